# nvmeio and its demo in a container:
#
#     docker build -t nvmeio .
#     docker run --rm -v /mnt/nvme:/data nvmeio                     # the demo, on that drive
#     docker run --rm -v /mnt/nvme:/data nvmeio nvmeio report --dir /data
#
# Linux AIO and O_DIRECT work under Docker's default seccomp profile. Write protection of memory (snapshots without a
# copy) needs userfaultfd: --cap-add SYS_PTRACE, or snapshots are copies. Page-locked memory: --ulimit memlock=-1.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE /src/
COPY native_shim /src/native_shim
COPY nvmeio /src/nvmeio
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
ARG TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir ${TORCH}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
COPY examples /examples
VOLUME /data
WORKDIR /data
CMD ["sh", "-c", "python /examples/00_first_look.py && python /examples/01_await_beside_compute.py"]
