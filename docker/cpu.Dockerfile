# docker build -f docker/cpu.Dockerfile -t headrace:cpu .
# docker run --rm -v "$PWD/runs:/runs" headrace:cpu train demo_moe run_dir=/runs/demo
FROM python:3.11-slim
# The base image's release decides the versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/headrace
COPY . .
RUN pip install --no-cache-dir -c constraints.txt '.[train,ray,trackers]'
RUN useradd --create-home trainer && mkdir /runs && chown trainer /runs
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["headrace"]
CMD ["--help"]
