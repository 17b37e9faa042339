#!/bin/sh
# Alertmanager with one receiver: the webhook that ETUDE_ALERT_WEBHOOK names gets Alertmanager's JSON, with each alert's
# `summary`, `action` and `runbook`. Other receivers (mail, chat, pagers) are Alertmanager's own: give it a file of yours.
set -eu
if [ -z "${ETUDE_ALERT_WEBHOOK:-}" ]; then
  echo "alertmanager: ETUDE_ALERT_WEBHOOK is empty; allowed: a URL. Set it in .env, or leave the profile alerts out" >&2
  exit 2
fi
umask 077 # the address may carry a secret
config=${TMPDIR:-/tmp}/alertmanager.yml
cat > "$config" <<END
route:
  receiver: people
  group_by: [alertname, run]
  group_wait: 10s
  group_interval: 5m
  repeat_interval: 12h
  routes:
    - matchers: ['severity = "critical"']
      repeat_interval: 2h
receivers:
  - name: people
    webhook_configs: [{url: "$ETUDE_ALERT_WEBHOOK", send_resolved: true}]
END
exec alertmanager --config.file="$config" --cluster.listen-address= "$@"
