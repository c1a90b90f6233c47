"""Threads: how one is asked, waited for, awaited and stopped; what an interrupt does meanwhile.

`interpreter` refuses the Pythons that these threads cannot work in.
"""
