"""cuFile (GPUDirect Storage): files to and from GPU memory through NVIDIA's libcufile.

Reading order: `library` (where it is, the binding, its codes in words), `driver` (one a process,
counted; what would hang or do harm is looked at first), `registry` (registered memory, registered
files), `engine` (what one call moves, and the threads that call it).

Importing any of them loads nothing: the library is loaded when an engine starts. It is bound
through cffi's ABI mode, so nothing of CUDA is needed to build nvmeio.

docs/how/cufile.md describes our findings about libcufile 1.11 to 1.20. One H100 has run this
engine, in compat mode, and no GPU its DMA: tests call the real library on host memory, and a fake.
"""
