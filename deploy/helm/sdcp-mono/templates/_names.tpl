{{/* Names, labels and identities. What takes a dict has `root`, `role` and, for drafters, `pool`. */}}

{{- define "sdcp.chart" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" }}
{{- end }}

{{/* At most 30 characters: a pool's Service adds 21, and a StatefulSet's pods and labels must stay below 63. */}}
{{- define "sdcp.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{ default $full .Values.fullnameOverride | trunc 30 | trimSuffix "-" }}
{{- end }}

{{- define "sdcp.role" -}}
{{ include "sdcp.fullname" .root }}-{{ .role }}{{ with .pool }}-{{ . }}{{ end }}
{{- end }}

{{- define "sdcp.host" -}}
{{ include "sdcp.role" . }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end }}

{{/* What a certificate names: the role or pool. Its instances are one label below. */}}
{{- define "sdcp.identity" -}}
https://{{ include "sdcp.host" . }}:9443/
{{- end }}

{{- define "sdcp.instances" -}}
https://*.{{ include "sdcp.host" . }}:9443/
{{- end }}

{{- define "sdcp.select" -}}
app.kubernetes.io/name: {{ include "sdcp.chart" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
sdcp-mono/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "sdcp.labels" -}}
{{ include "sdcp.select" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "sdcp.serviceAccount" -}}
{{ default (.Values.serviceAccount.create | ternary (include "sdcp.fullname" .) "default") .Values.serviceAccount.name }}
{{- end }}

{{/* The pools of drafters, each with the defaults filled in, as JSON. */}}
{{- define "sdcp.pools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.drafters.pools -}}
{{- if not (kindIs "invalid" $pool) -}}
{{- $_ := set $pools $name (mergeOverwrite (deepCopy $.Values.drafters.defaults) (deepCopy $pool)) -}}
{{- end -}}
{{- end -}}
{{ toJson $pools }}
{{- end }}

{{/* Every role that has a certificate, as a JSON list. */}}
{{- define "sdcp.parties" -}}
{{- $parties := list (dict "role" "router") (dict "role" "verifier") (dict "role" "mlc") -}}
{{- range $name, $_ := include "sdcp.pools" . | fromJson -}}
{{- $parties = append $parties (dict "role" "drafter" "pool" $name) -}}
{{- end -}}
{{ toJson $parties }}
{{- end }}

{{/* The Secret with a role's certificate. */}}
{{- define "sdcp.secret" -}}
{{- if eq .root.Values.tls.source "existing" -}}
{{- $secrets := .root.Values.tls.existing -}}
{{- $name := eq .role "drafter" | ternary (get $secrets.drafters (default "" .pool)) (get $secrets .role) -}}
{{ required (printf "tls.existing: the Secret of %s%s, with tls.crt, tls.key and ca.crt" .role (.pool | empty | ternary "" (print " pool " .pool))) $name }}
{{- else -}}
{{ include "sdcp.role" . }}-tls
{{- end -}}
{{- end }}
