#!/bin/bash
# build.sh [tools|base|servers|etude|all]: every image of docker-compose.yml without an image registry, from Debian packages,
# Go modules, Maven artefacts and Python packages. Needs root, docker, debootstrap, go, mvn. Afterwards:
#   docker compose -f docker-compose.yml -f infra/docker/local/compose.yml up --wait
# Images that exist already are kept; FORCE=1 makes them anew.
set -euo pipefail
cd "$(dirname "$0")"
export DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0} # the classic builder needs no plugin
exporter=github.com/danielqsj/kafka_exporter@v1.9.0

have() { [ -z "${FORCE:-}" ] && docker image inspect "$1" >/dev/null 2>&1; }
build() { have "etude-local/$1" || { docker build -q -t "etude-local/$1" "${@:3}" "$2" >/dev/null && echo "built etude-local/$1"; }; }

tools() { # docker compose as a plugin, and the servers that are Go programs; pinned by tools/go.mod and tools/go.sum
  local compose minio commit date
  compose=$(cd tools && go list -m -f '{{.Version}}' github.com/docker/compose/v2)
  minio=$(cd tools && go list -m -f '{{.Version}}' github.com/minio/minio) # v0.0.0-YYYYMMDDhhmmss-commit: no release tag resolves
  commit=${minio##*-} date=${minio#*-} date=${date%-*}
  date="${date:0:4}-${date:4:2}-${date:6:2}T${date:8:2}-${date:10:2}-${date:12:2}Z"
  mkdir -p bin
  (cd tools
   go build -trimpath -ldflags "-s -w -X github.com/docker/compose/v2/internal.Version=$compose" \
      -o ../bin/docker-compose github.com/docker/compose/v2/cmd
   local package=github.com/minio/minio/cmd
   go build -trimpath -ldflags "-s -w -X $package.ReleaseTag=DEVELOPMENT.$date -X $package.CommitID=$commit \
      -X $package.ShortCommitID=$commit" -o ../bin/minio github.com/minio/minio)
  GOBIN="$PWD/bin" CGO_ENABLED=0 go install -trimpath -ldflags "-s -w" "$exporter"
  install -D bin/docker-compose "${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins/docker-compose"
}
base() {
  have etude-local/debian:bookworm || ./mkbase.sh bookworm etude-local/debian:bookworm
  have etude-local/debian:trixie || ./mkbase.sh trixie etude-local/debian:trixie # PostgreSQL 17 is in trixie
  build python:3.11 python
}
servers() {
  [ -x bin/minio ] || { echo "bin/minio is missing: run $0 tools first" >&2; exit 1; }
  mvn -q -B -f kafka/pom.xml dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=libs
  cp bin/minio minio/minio
  cp bin/kafka_exporter kafka-exporter/kafka_exporter
  for name in kafka postgres minio redis prometheus kafka-exporter; do build "$name" "$name"; done
}
etude() { (cd ../../.. && docker compose -f docker-compose.yml -f infra/docker/local/compose.yml --profile '*' build); }

case ${1:-all} in
  tools|base|servers|etude) "$1" ;;
  all) tools; base; servers; etude ;;
  *) sed -n '2,5p' "$0"; exit 2 ;;
esac
