# manyhands on a slim Python, as a user without privileges:
#
#   docker build -t manyhands .
#   docker run --rm -v "$PWD/runs:/runs" manyhands train ppo --env CartPole-v1
#
# For a small image without GPU support, take torch from where PyTorch's install page says the CPU
# build is: --build-arg TORCH="torch --index-url ADDRESS". Other extras: --build-arg EXTRAS=ray,mpi.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ARG TORCH="torch"
ARG EXTRAS="mpi,atari,mujoco,box2d,compiled"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# torch first: it is the large layer, and stays when only the code has changed.
RUN pip install ${TORCH}

COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
COPY examples /source/examples
RUN pip install "/source[${EXTRAS}]" && rm -rf /source

# A folder of the host keeps its owner: where that is not user 1000, add --user "$(id -u)".
RUN useradd --create-home --uid 1000 worker && mkdir /runs && chown worker /runs
USER worker
ENV HOME=/tmp
WORKDIR /
ENTRYPOINT ["manyhands"]
CMD ["--help"]
