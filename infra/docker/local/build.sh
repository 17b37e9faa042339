#!/bin/bash
# build.sh [tools|base|servers|etude|all]: every image of docker-compose.yml but Grafana's and inference-gpu's, without an image
# registry: from Debian packages, Go modules, Maven artefacts, Python packages. Needs root, docker, debootstrap, go, mvn, python3.
# What is built or fetched lies in ~/.cache/etude, outside the tree; what exists is not made again. FORCE=1: base images too.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
cache=$HOME/.cache/etude/images
export DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0} # the classic builder needs no plugin

need() {
  for tool in "$@"; do
    command -v "$tool" >/dev/null || { echo "$tool is not on the PATH (docker.io, debootstrap, maven, golang: see docs/operations.md)" >&2; exit 1; }
  done
}
have() { [ -z "${FORCE:-}" ] && docker image inspect "$1" >/dev/null 2>&1; }
image() { # image NAME [FILE …]: etude-local/NAME from the folder of that name and the files beside its Dockerfile
  local name=$1 context=$cache/context/$1
  rm -rf "$context" && mkdir -p "$context" && cp -r "$here/$name/." "$context"
  [ $# -eq 1 ] || cp -r "${@:2}" "$context"
  docker build -q -t "etude-local/$name" "$context" >/dev/null
  rm -rf "$context"
  echo "image etude-local/$name"
}

tools() { # docker compose as a plugin; the servers that are Go programs
  need go
  mkdir -p "$cache"
  local version
  version=$(cd "$here/tools" && go list -m -f '{{.Version}}' github.com/docker/compose/v2)
  if ! [ -x "$cache/docker-compose-$version" ]; then
    echo "building docker compose $version"
    (cd "$here/tools" && go build -trimpath -ldflags "-s -w -X github.com/docker/compose/v2/internal.Version=$version" \
      -o "$cache/docker-compose-$version" github.com/docker/compose/v2/cmd)
  fi
  install -D "$cache/docker-compose-$version" "${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins/docker-compose"
  minio >/dev/null
}
minio() { # the path of the program, which the servers of the tests share
  (cd "$root" && python3 -c 'import sys; from infra.servers.minio import Minio; sys.stdout, out = sys.stderr, sys.stdout
server = Minio(); server.install(); print(server.program, file=out)')
}
base() {
  need debootstrap
  have etude-local/debian:bookworm || "$here/mkbase.sh" bookworm etude-local/debian:bookworm
  have etude-local/debian:trixie || "$here/mkbase.sh" trixie etude-local/debian:trixie # PostgreSQL 17 is in trixie
  docker build -q --target slim -t etude-local/python:3.11-slim "$here/python" >/dev/null
  docker build -q -t etude-local/python:3.11 "$here/python" >/dev/null
  echo "image etude-local/python:3.11, and the same without what builds"
}
servers() {
  need mvn
  local jars path
  jars=$cache/kafka-$(sha256sum <"$here/kafka/pom.xml" | cut -c1-12)
  if ! [ -d "$jars" ]; then
    rm -rf "$jars.part"
    mvn -q -B -f "$here/kafka/pom.xml" dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$jars.part/libs"
    mv "$jars.part" "$jars"
  fi
  path=$(minio)
  mkdir -p "$cache/minio" && cp -u "$path" "$cache/minio/minio"
  image kafka "$jars/libs"
  image minio "$cache/minio/minio"
  for name in postgres redis prometheus alertmanager; do image "$name"; done
}
etude() {
  cd "$root"
  python3 infra/docker/env.py --local # what is there stays; a release may ask for more
  . infra/docker/revision.sh
  # One service per image, one after another: the classic builder works on every service at once and shares nothing that
  # is not finished, so that four services of one image would install its packages four times over.
  COMPOSE_PARALLEL_LIMIT=1 docker compose -f docker-compose.yml -f infra/docker/local/compose.yml --profile '*' build \
    scheduler rollout inference trainer trainer-gpu demo
}

need docker
case ${1:-all} in
  tools|base|servers|etude) "$1" ;;
  all) tools; base; servers; etude ;;
  *) sed -n '2,4p' "$0"; exit 2 ;;
esac
