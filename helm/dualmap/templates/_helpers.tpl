{{/* Prefix of every object's name. If the release's name contains "dualmap", the prefix is the release's name. The prefix has
at most 45 characters, because the names of objects add up to 18 characters, and the name of a Service has a limit of 63. */}}
{{- define "dualmap.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- else if contains "dualmap" .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-dualmap" .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Selector labels of a component. An upgrade never changes these labels. Arguments: (list $ "router"). */}}
{{- define "dualmap.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: dualmap
app.kubernetes.io/instance: {{ $root.Release.Name | toYaml }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object. Arguments: (list $ "router"). */}}
{{- define "dualmap.labels" -}}
{{- $root := index . 0 -}}
{{ include "dualmap.selector" . }}
app.kubernetes.io/part-of: dualmap
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of a pod. The labels do not contain the chart's version, so that an upgrade does not replace every pod. */}}
{{- define "dualmap.podLabels" -}}
{{ include "dualmap.selector" . }}
app.kubernetes.io/part-of: dualmap
{{- end -}}

{{/* Image reference, by digest if a digest is set. Arguments: (list $ .Values.image). */}}
{{- define "dualmap.reference" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- $name := trimPrefix "/" (printf "%s/%s" $image.registry $image.repository) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "dualmap.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "dualmap.podSecurity" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .Values.podSecurity.runAsUser }}
  runAsUser: {{ int . }}
  runAsGroup: {{ int . }}
  fsGroup: {{ int . }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "dualmap.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* Mounts of the tokenizers' folders in a router's container. */}}
{{- define "dualmap.tokenizerMounts" -}}
{{- range .Values.router.tokenizers }}
- name: tokenizer-{{ .name }}
  mountPath: /etc/dualmap/tokenizers/{{ .name }}
  {{- with .subPath }}
  subPath: {{ . | toYaml }}
  {{- end }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* Volumes with the tokenizers' folders. */}}
{{- define "dualmap.tokenizerVolumes" -}}
{{- range .Values.router.tokenizers }}
- name: tokenizer-{{ .name }}
  {{- toYaml .volume | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Arguments of a router that records. */}}
{{- define "dualmap.recordArguments" -}}
{{- with .Values.router.record }}
{{- if .enabled }}
- --record=/var/lib/dualmap/recordings/$(POD_NAME)
- --record-sample={{ .sample }}
- --record-max={{ .max }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The environment variable in these arguments. */}}
{{- define "dualmap.recordEnvironment" -}}
{{- if .Values.router.record.enabled }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end }}
{{- end -}}

{{/* Mount of the recordings' volume. */}}
{{- define "dualmap.recordMounts" -}}
{{- if .Values.router.record.enabled }}
- name: recordings
  mountPath: /var/lib/dualmap/recordings
{{- end }}
{{- end -}}

{{/* Volumes of a router that records: the recordings, and their key. */}}
{{- define "dualmap.recordVolumes" -}}
{{- with .Values.router.record }}
{{- if .enabled }}
- name: recordings
  {{- toYaml (.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- if .keySecretName }}
- name: recordings-key
  secret:
    secretName: {{ .keySecretName | toYaml }}
    items:
    - key: key
      path: key
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Init container that puts the recordings' key into the pod's folder. */}}
{{- define "dualmap.recordKey" -}}
{{- if and .Values.router.record.enabled .Values.router.record.keySecretName }}
- name: recordings-key
  image: {{ include "dualmap.reference" (list . .Values.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -c, 'mkdir -p "$1" && umask 077 && cp /etc/dualmap/recordings-key/key "$1/key"', recordings-key]
  args: [/var/lib/dualmap/recordings/$(POD_NAME)]
  env:
  {{- include "dualmap.recordEnvironment" . | trim | nindent 2 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  {{- include "dualmap.containerSecurity" . | nindent 2 }}
  volumeMounts:
  {{- include "dualmap.recordMounts" . | trim | nindent 2 }}
  - name: recordings-key
    mountPath: /etc/dualmap/recordings-key
    readOnly: true
{{- end }}
{{- end -}}

{{/* Containers beside a router that render prompts. */}}
{{- define "dualmap.renderers" -}}
{{- range .Values.router.renderers }}
- name: renderer-{{ .name }}
  image: {{ .image }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command: {{- toYaml .command | nindent 2 }}
  args: {{- toYaml .args | nindent 2 }}
  resources:
    {{- toYaml (.resources | default (dict "requests" (dict "cpu" "500m" "memory" "512Mi") "limits" (dict "memory" "1Gi"))) | nindent 4 }}
  {{- include "dualmap.containerSecurity" $ | nindent 2 }}
  {{- if $.Values.router.tokenizers }}
  volumeMounts:
  {{- include "dualmap.tokenizerMounts" $ | trim | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Probes of a router or picker. A router that waits for its pools is alive, but not ready. */}}
{{- define "dualmap.routerProbes" -}}
startupProbe:
  grpc:
    port: 9003
    service: liveness
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  grpc:
    port: 9003
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  grpc:
    port: 9003
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{/* Scheduling fields of a pod. Arguments: (list $ "router" .Values.router). */}}
{{- define "dualmap.placement" -}}
{{- $component := index . 2 -}}
{{- $selector := include "dualmap.selector" . -}}
{{- with ($component.topologySpread | default dict).topologyKeys }}
topologySpreadConstraints:
{{- range . }}
- topologyKey: {{ . | toYaml }}
  maxSkew: 1
  whenUnsatisfiable: {{ $component.topologySpread.whenUnsatisfiable }}
  # Spread the pods of each revision separately, so that old pods do not affect the spread of new pods.
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- $selector | nindent 6 }}
{{- end }}
{{- end }}
{{- with $component.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.priorityClassName }}
priorityClassName: {{ . | toYaml }}
{{- end }}
{{- end -}}

{{/* Namespace argument of the operator and the routers. */}}
{{- define "dualmap.scope" -}}
{{- if .Values.watchNamespace -}}--namespace={{ .Values.watchNamespace }}{{- else -}}--all-namespaces{{- end -}}
{{- end -}}

{{/* Number of seconds in a duration such as "25s", "5m" or "1h". */}}
{{- define "dualmap.seconds" -}}
{{- $unit := . | trimAll "0123456789" -}}
{{- $number := trimSuffix $unit . | int -}}
{{- if eq $unit "h" }}{{ mul $number 3600 }}{{ else if eq $unit "m" }}{{ mul $number 60 }}{{ else }}{{ $number }}{{ end -}}
{{- end -}}

{{/* The routers' DNS name in the cluster. */}}
{{- define "dualmap.routerHost" -}}
{{ include "dualmap.fullname" . }}-router.{{ .Release.Namespace }}
{{- end -}}

{{/* Name of a pool's picker. Arguments: (list $ "pool"). */}}
{{- define "dualmap.picker" -}}
{{ include "dualmap.fullname" (index . 0) }}-epp-{{ index . 1 }}
{{- end -}}

{{/* Smallest number of routers. */}}
{{- define "dualmap.fewestRouters" -}}
{{- with .Values.router }}{{ if .autoscaling.enabled }}{{ .autoscaling.minReplicas }}{{ else }}{{ .replicas }}{{ end }}{{ end -}}
{{- end -}}

{{/* Greatest number of routers. */}}
{{- define "dualmap.mostRouters" -}}
{{- with .Values.router }}{{ if .autoscaling.enabled }}{{ .autoscaling.maxReplicas }}{{ else }}{{ .replicas }}{{ end }}{{ end -}}
{{- end -}}

{{/* The mode of router.tls, with `auto` resolved: what the Envoys in front of the routers are able to do. With `ephemeral`, each
picker makes a self-signed certificate when it starts: gateways of the Gateway API do not verify it. */}}
{{- define "dualmap.tlsMode" -}}
{{- $mode := .Values.router.tls.mode -}}
{{- if eq $mode "auto" }}{{ get (dict "bundled" "generated" "gaie" "ephemeral" "none" "none") .Values.gateway.mode }}{{ else }}{{ $mode }}{{ end -}}
{{- end -}}

{{/* "true" if the routers require a client certificate, else "". */}}
{{- define "dualmap.mutual" -}}
{{- $mode := include "dualmap.tlsMode" . -}}
{{- if or (eq $mode "generated") (and .Values.router.tls.mutual (ne $mode "none")) }}true{{ end -}}
{{- end -}}

{{/* Name of the Secret with the routers' certificate, or an empty string without TLS. */}}
{{- define "dualmap.routerSecret" -}}
{{- $mode := include "dualmap.tlsMode" . -}}
{{- $name := include "dualmap.fullname" . -}}
{{- if eq $mode "secret" }}{{ .Values.router.tls.secretName }}{{ else if eq $mode "generated" }}{{ $name }}-router-mtls{{ else if ne $mode "none" }}{{ $name }}-router-tls{{ end -}}
{{- end -}}

{{/* Name of the Secret with Envoy's client certificate, or an empty string without mutual TLS. */}}
{{- define "dualmap.gatewaySecret" -}}
{{- $mode := include "dualmap.tlsMode" . -}}
{{- $name := include "dualmap.fullname" . -}}
{{- if include "dualmap.mutual" . -}}
{{- if eq $mode "secret" }}{{ .Values.router.tls.gatewaySecretName }}{{ else if eq $mode "generated" }}{{ $name }}-gateway-mtls{{ else }}{{ $name }}-gateway-tls{{ end -}}
{{- end -}}
{{- end -}}

{{/* What a pod mounts of a Secret with a certificate. The operator may not have generated it yet: the pod waits. */}}
{{- define "dualmap.certificateItems" -}}
{{- if eq (include "dualmap.tlsMode" .) "generated" -}}
items:
{{- range list "ca.crt" "tls.crt" "tls.key" }}
- {key: {{ . }}, path: {{ . }}}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The Secrets of the release's namespace that the operator generates: as PURPOSE=NAME, separated by commas. */}}
{{- define "dualmap.generated" -}}
{{- $name := include "dualmap.fullname" . }}
{{- $made := list }}
{{- if ne .Values.gateway.mode "gaie" }}
{{- if eq (include "dualmap.tlsMode" .) "generated" }}
{{- $made = list (printf "authority=%s-authority" $name) (printf "server=%s-router-mtls" $name) }}
{{- if include "dualmap.mutual" . }}
{{- $made = append $made (printf "client=%s-gateway-mtls" $name) }}
{{- end }}
{{- end }}
{{- if eq .Values.redis.mode "bundled" }}
{{- $made = append $made (printf "redis=%s-redis-password" $name) }}
{{- end }}
{{- if not .Values.router.hashKey.secretName }}
{{- $made = append $made (printf "hash=%s-hash-key" $name) }}
{{- end }}
{{- end }}
{{- join "," $made }}
{{- end -}}

{{/* Fails if the cluster does not serve an API that a value needs. Arguments: (list $ "group/version/Kind" "the.value" "what to install"). */}}
{{- define "dualmap.require" -}}
{{- $root := index . 0 -}}
{{- if not ($root.Capabilities.APIVersions.Has (index . 1)) -}}
{{- fail (printf "%s: this cluster does not serve %s. Install %s first, or disable the value. (With helm template, add --api-versions %s.)" (index . 2) (index . 1) (index . 3) (index . 1)) -}}
{{- end -}}
{{- end -}}
