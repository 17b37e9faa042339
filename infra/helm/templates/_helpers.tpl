{{- define "etude.labels" -}}
app.kubernetes.io/name: etude
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{/* Not empty: its engine is SGLang. */}}
{{- define "etude.sglang" -}}
{{- if eq (.service.engine | default "embedded") "sglang" }}yes{{ end }}
{{- end }}

{{- define "etude.image" -}}
{{ .root.Values.images.registry }}etude/{{ .service.image }}{{ if include "etude.sglang" . }}-sglang{{ end }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* As JSON, for ETUDE_NEIGHBOURS: service -> headless names of its deployments. The console knows itself. */}}
{{- define "etude.neighbours" -}}
{{- $release := .root.Release.Name }}
{{- $found := dict }}
{{- range $name, $service := .root.Values.services }}
{{- if ne $name "console" }}
{{- $kind := $service.module | splitList "." | last }}
{{- $places := get $found $kind | default list }}
{{- $_ := set $found $kind (append $places (printf "%s-%s-pods:8700" $release $name)) }}
{{- end }}
{{- end }}
{{- $found | toJson }}
{{- end }}

{{/* What every service is told; the same names as docker-compose.yml uses. */}}
{{- define "etude.environment" -}}
{{- if not .service.secret }}
{{- range $name, $key := dict "ETUDE_BUS" "bus" "ETUDE_OBJECTS" "objects" }}
{{- $url := index $.root.Values.servers $key }}
{{- if eq $url "secret" }}
- {name: {{ $name }}, valueFrom: {secretKeyRef: {name: {{ $.root.Values.secret }}, key: {{ $key }}}}}
{{- else }}
- {name: {{ $name }}, value: {{ $url | quote }}}
{{- end }}
{{- end }}
- {name: ETUDE_S3_ACCESS_KEY, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: s3-access-key}}}
- {name: ETUDE_S3_SECRET_KEY, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: s3-secret-key}}}
{{- end }}
- {name: ETUDE_LOG_LEVEL, value: {{ .root.Values.logLevel }}}
- {name: ETUDE_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: ETUDE_ADVERTISE, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- if .service.ledger }}
- {name: ETUDE_LEDGER, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: ledger}}}
{{- end }}
{{- if .service.jobs }}
- {name: ETUDE_JOBS, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: jobs}}}
{{- end }}
{{- if include "etude.sglang" . }}
- {name: ETUDE_ENGINE, value: sglang}
{{- end }}
{{- if include "etude.opensPods" . }}
- {name: ETUDE_SANDBOX, value: kubernetes}
- {name: ETUDE_SANDBOX_NAMESPACE, value: {{ .root.Values.sandboxes.kubernetes.namespace }}}
- {name: ETUDE_SANDBOX_LOADER, value: {{ include "etude.loader" .root }}}
{{- with .root.Values.sandboxes.kubernetes.runtimeClass }}
- {name: ETUDE_SANDBOX_RUNTIME, value: {{ . }}}
{{- end }}
{{- with .root.Values.sandboxes.kubernetes.image }}
- {name: ETUDE_SANDBOX_IMAGE, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if eq .name "console" }}
# Each pod has a state directory of its own: `etude status`, asked for in the console's pod, reads this, too.
- {name: ETUDE_NEIGHBOURS, value: {{ include "etude.neighbours" . | squote }}}
# Without the key a token is made at each start; it lies in the pod, in console/token below the state directory.
- {name: ETUDE_CONSOLE_TOKEN, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: console-token, optional: true}}}
# Prometheus and the probes ask for the pod's address.
- name: ETUDE_CONSOLE_NAMES
  value: {{ append .root.Values.console.names "$(ETUDE_ADVERTISE)" | toJson | squote }}
{{- end }}
{{- with .root.Values.traces }}
{{- if .share }}
- {name: ETUDE_TRACES, value: {{ .share | quote }}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ required "traces.endpoint: found none; allowed: http://HOST:PORT of an OpenTelemetry collector" .endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_HEADERS, valueFrom: {secretKeyRef: {name: {{ $.root.Values.secret }}, key: otlp-headers, optional: true}}}
{{- range $name, $value := .environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := .service.environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* Not empty: worker pods see an unmasked /proc, so that sandboxes can mount their own. */}}
{{- define "etude.unmasked" -}}
{{- $said := .Values.sandboxes.unmasked | toString }}
{{- if not (has $said (list "auto" "true" "false")) }}
{{- fail (printf "sandboxes.unmasked: found %s; allowed: auto, true, false" $said) }}
{{- end }}
{{- if or (eq $said "true") (and (eq $said "auto") (semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version)) }}yes{{ end }}
{{- end }}

{{/* The image of workers, which brings the loop into sandboxes' pods. */}}
{{- define "etude.loader" -}}
{{ .Values.images.registry }}etude/worker:{{ .Values.images.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Not empty: the service opens sandboxes in pods. */}}
{{- define "etude.opensPods" -}}
{{- if and .root.Values.sandboxes.kubernetes.enabled (eq .service.image "worker") }}yes{{ end }}
{{- end }}

{{/* The pod of a pool; shared/sandbox/pods/objects.py makes the same, and a test compares the two. */}}
{{- define "etude.sandboxPod" -}}
{{- $kubernetes := .root.Values.sandboxes.kubernetes }}
{{- $memory := int .pool.memoryMb }}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
hostUsers: false
hostname: sandbox
dnsPolicy: None
dnsConfig: {nameservers: [127.0.0.1]}
terminationGracePeriodSeconds: 0
{{- with $kubernetes.runtimeClass }}
runtimeClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 61000
  runAsGroup: 61000
  fsGroup: 61000
  seccompProfile: {type: Localhost, localhostProfile: {{ .root.Values.sandboxes.seccompProfile }}}
  appArmorProfile: {type: {{ .root.Values.sandboxes.appArmor }}}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
initContainers:
  - name: loader
    image: {{ include "etude.loader" .root }}
    command: [python, -m, shared.sandbox.pods.install, /install]
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts: [{name: loop, mountPath: /install}]
    resources: {limits: {memory: 512Mi}}
containers:
  - name: sandbox
    image: {{ .pool.image }}
    command: ["/.etude/libraries/loader", "--library-path", "/.etude/libraries", "/.etude/bin/python3", "-I", "-S", "-X", "utf8", "-c", "import runpy, sys; sys.path.insert(0, '/.etude-code'); runpy.run_module('shared.sandbox.inside.porter', run_name='__main__', alter_sys=True)"]
    workingDir: /
    env: [{name: LD_PRELOAD, value: ""}, {name: LD_LIBRARY_PATH, value: ""}, {name: LD_AUDIT, value: ""}]
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, procMount: Unmasked, capabilities: {drop: [ALL]}}
    resources:
      requests: {memory: {{ $memory }}Mi, cpu: 100m}
      limits: {memory: {{ $memory }}Mi, cpu: 2000m}
    volumeMounts:
      - {name: loop, mountPath: /.etude, subPath: home, readOnly: true}
      - {name: loop, mountPath: /.etude-code, subPath: code, readOnly: true}
      - {name: layer, mountPath: /.etude-layer}
      - {name: scratch, mountPath: /.etude-scratch}
      {{- range $at, $path := list "/workspace" "/home/agent" "/tmp" "/var/tmp" "/opt/etude" }}
      - {name: places, mountPath: {{ $path }}, subPath: {{ $at | quote }}}
      {{- end }}
volumes:
  - {name: loop, emptyDir: {}}
  - {name: layer, emptyDir: {sizeLimit: {{ mul (int .pool.diskMb) 4 }}Mi}}
  - {name: scratch, emptyDir: {medium: Memory, sizeLimit: {{ min 128 (max 1 (div $memory 4)) }}Mi}}
  - {name: places, emptyDir: {sizeLimit: 1Mi}}
{{- end }}
