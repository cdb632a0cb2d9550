{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.metadata" -}}
metadata:
  name: {{ .Release.Name }}
  labels: {{- include "tandem.labels" . | nindent 4 }}
{{- end }}

{{- /* The server's file: what the values say, and what follows from ports and mounts of the pod. */ -}}
{{- define "tandem.deployment" -}}
{{- $server := dict "host" "0.0.0.0" "port" 8000 }}
{{- if .Values.keysSecret }}{{ $_ := set $server "api_keys_file" "/keys/keys" }}{{ end }}
{{- $fixed := dict "server" $server }}
{{- if gt (int .Values.gpus) 1 }}{{ $_ := set $fixed "gpu" (dict "devices" (int .Values.gpus)) }}
{{- else if .Values.disk.size }}{{ $_ := set $fixed "disk" (dict "folder" "/cache/contexts") }}{{ end }}
{{- mergeOverwrite (deepCopy .Values.deployment) $fixed | toYaml }}
{{- end }}
