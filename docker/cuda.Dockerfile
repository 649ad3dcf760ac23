# docker build -f docker/cuda.Dockerfile -t headrace:cuda .
# docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" headrace:cuda train my.yaml
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
# The base image's release decides the versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/headrace
COPY . .
# vLLM decides the version of torch, so the pins for CPUs are left out.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[train,ray,vllm,trackers]'
RUN useradd --create-home trainer
USER trainer
WORKDIR /work
ENTRYPOINT ["headrace"]
CMD ["doctor"]
