# . infra/docker/revision.sh: which commit docker-compose.yml builds its images of; their labels say so. The commit's own time:
# the same commit makes the same labels. What is changed and not committed shows as -dirty.
if git rev-parse -q --verify HEAD >/dev/null 2>&1; then
  ETUDE_REVISION=$(git rev-parse HEAD)$(git diff --quiet HEAD || echo -dirty)
  ETUDE_CREATED=$(TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd)
  export ETUDE_REVISION ETUDE_CREATED
else
  echo "git finds no commit here: the images will not say what they are made of" >&2
fi
