{{- define "mqmk.name" -}}
{{- printf "%s-mqmk" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "mqmk.selector" -}}
app.kubernetes.io/name: mqmk-daemon
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mqmk.labels" -}}
{{ include "mqmk.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "mqmk.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "mqmk.apiKeys" -}}
{{- if .Values.secrets.existingApiKeys -}}
{{ .Values.secrets.existingApiKeys }}
{{- else if .Values.secrets.apiKeys -}}
{{ include "mqmk.name" . }}-api-keys
{{- else -}}
{{- fail "secrets.apiKeys or secrets.existingApiKeys is needed: the pod listens beyond loopback (mqmk-daemon api-key new NAME --file api-keys)" -}}
{{- end -}}
{{- end -}}
