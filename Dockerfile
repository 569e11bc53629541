# The image for containers, Kubernetes and HF Jobs (docs/launching.md):
#   docker build -t REGISTRY/finetune:1.0 . && docker push REGISTRY/finetune:1.0
FROM python:3.12.12-slim

# g++ and ninja are for compiled layers and DeepSpeed's offload; tini passes signals on and collects ended processes.
# Debian removes old versions, so naming one would break the build in weeks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build tini \
    && rm -rf /var/lib/apt/lists/*

# CUDA's libraries come with this build: the host needs the driver and NVIDIA's container toolkit alone.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cu130 'torch==2.13.0+cu130'

COPY . /opt/finetune
WORKDIR /opt/finetune
# Compiled here, because the image's user may not write beside the sources.
RUN DS_BUILD_OPS=0 pip install --no-cache-dir -e '.[qlora,deepspeed,storage]' && python -m compileall -q finetune

RUN useradd --uid 1000 --create-home trainer && install -d -o trainer /work /work/runs /cache
ENV HF_HOME=/cache/huggingface FINETUNE_CACHE=/cache/finetune MPLCONFIGDIR=/tmp/matplotlib
VOLUME ["/work/runs", "/cache"]
USER 1000
WORKDIR /work
ENTRYPOINT ["tini", "--"]
CMD ["finetune", "--help"]
