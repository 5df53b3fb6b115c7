# syntax=docker/dockerfile:1
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
# Where pip finds a CPU build of torch, e.g. PyTorch's own CPU index; without it, the default index and its CUDA build.
ARG TORCH_INDEX_URL=""
# Of pyproject.toml, comma-separated; a GPU wants `store,gpu` (deploy/compose.gpu.yaml).
ARG EXTRAS="store"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/moonvit
ENV PATH=/opt/moonvit/bin:$PATH
WORKDIR /src
# From the rarest change to the most frequent: torch, the other packages, our code.
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        extras = [line for name in '$EXTRAS'.split(',') if name for line in p['optional-dependencies'][name]]; \
        print(*p['dependencies'], *extras, sep='\n')" > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY encoder encoder
COPY app app
RUN pip install --no-deps .

FROM python:${PYTHON_VERSION}-slim
# Debian packages: Triton compiles with gcc on a GPU.
ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $APT_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi
# /cache: where kernels are kept that are compiled on a GPU, if a volume is there.
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin moonvit \
    && install -d -o 10001 /cache
COPY --from=build /opt/moonvit /opt/moonvit
# PASSIVE: threads of a matrix product that wait do not spin. Where others use the same cores, spinning ones take the time
# of those they wait for, and a pass through the tower has taken 30 times as long.
ENV PATH=/opt/moonvit/bin:$PATH \
    OMP_WAIT_POLICY=PASSIVE \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MOONVIT_HOST=0.0.0.0 \
    MOONVIT_PORT=8000 \
    MOONVIT_CONTROL_PORT=8001
USER 10001
# Film workers run in an empty directory, see docs/media.md. Nothing needs /dev/shm: what crosses between processes lies
# in anonymous memory files, which count as the container's memory.
WORKDIR /tmp
# 8001 is for probes and Prometheus: health checks, /metrics and /v1/info over plain HTTP, whatever 8000 is served with.
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# A full-size model takes a while to read; failures in the start period do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", \
    "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"MOONVIT_CONTROL_PORT\"]}/health/ready', timeout=4)"]
ENTRYPOINT ["moonvit-serve", "serve"]
