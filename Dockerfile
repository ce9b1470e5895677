# One image for every role; the role is the command: `dora run`, `dora serve`, `dora train` under torchrun, ...
#
#   docker build -t dora .
#   docker run --rm --init --shm-size=1g -v "$PWD/runs:/work/runs" dora run
#
# --build-arg PIP_EXTRA_INDEX_URL=<index of PyTorch's CPU build> avoids gigabytes of CUDA packages. Live versions are
# kept in /dev/shm, of which a container has 64 MB by default; without room there they go to the run folder. `runs` must
# be writable for user 10001. To reach the status page from outside:
#   -p 127.0.0.1:8421:8421 ... run --set status.host=0.0.0.0
# Another container resumes a run without --trust-folder if both have the same DORA_TOKEN (docs/SECURITY.md).
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

COPY pyproject.toml README.md LICENSE /src/
COPY dora /src/dora
RUN pip install '/src[pyarrow,reasoning-gym,renderers]' && rm -rf /src \
    && useradd --uid 10001 --create-home dora \
    && install --directory --owner=dora /work/runs

USER dora
WORKDIR /work
ENTRYPOINT ["dora"]
CMD ["--help"]
