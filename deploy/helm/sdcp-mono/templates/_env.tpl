{{/* The environment of a role; the same dict as sdcp.pod. */}}
{{- define "sdcp.env" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $ip := contains ":" $values.listenAddress | ternary (printf "[%s]" $values.listenAddress) $values.listenAddress -}}
- {name: SDCP_DATA_DIR, value: /data}
- {name: SDCP_LOG_LEVEL, value: {{ $values.logLevel }}}
{{- range $name, $folder := dict "HOME" "/data" "XDG_CACHE_HOME" "/data/cache" "HF_HOME" "/data/huggingface" "TORCH_HOME" "/data/torch" "TORCHINDUCTOR_CACHE_DIR" "/data/inductor" "TRITON_CACHE_DIR" "/data/triton" "TMPDIR" "/tmp" }}
- {name: {{ $name }}, value: {{ $folder }}}
{{- end }}
{{- if ne .role "mlc" }}
{{- with $values.model.id }}
- {name: SDCP_MODEL, value: {{ . | quote }}}
{{- end }}
- {name: SDCP_DTYPE, value: {{ $values.model.dtype }}}
{{- end }}
{{- if has .role (list "router" "all-in-one") }}
- {name: SDCP_HOST, value: {{ $values.listenAddress | quote }}}
- {name: SDCP_PORT, value: "8000"}
{{- else }}
- {name: SDCP_STATUS_HOST, value: {{ $values.listenAddress | quote }}}
- {name: SDCP_STATUS_PORT, value: "9090"}
{{- end }}
{{- if eq .role "all-in-one" }}
- {name: SDCP_GATEWAY, value: "false"}
{{- else }}
{{- include "sdcp.links" (dict "root" $root "role" .role "pool" .pool "listen" (print $ip ":9443")) }}
{{- end }}
{{- if has .role (list "mlc" "all-in-one") }}
{{- include "sdcp.stores" $root }}
{{- end }}
{{- $settings := .values.settings }}
{{- if and (eq .role "verifier") (gt (int .values.gpu.count) 1) }}
{{- $settings = merge (dict) $settings (dict "tensor_parallel" .values.gpu.count) }}
{{- end }}
{{- range $name, $value := $settings }}
- {name: SDCP_{{ upper $name }}, value: {{ include "sdcp.setting" (dict "value" $value) }}}
{{- end }}
{{- if $values.otel.enabled }}
- {name: OTEL_SERVICE_NAME, value: {{ printf "sdcp-mono-%s" .role }}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ $values.otel.endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ $values.otel.protocol | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: {{ $values.otel.sampler | quote }}}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $values.otel.samplerArg | quote }}}
{{- end }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Who a role is and whom it meets. */}}
{{- define "sdcp.links" }}
{{- $root := .root }}
{{- if eq .role "verifier" }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: SDCP_BASE, value: "https://$(POD_NAME).{{ include "sdcp.host" . }}:9443/"}
{{- else if eq .role "mlc" }}
- {name: SDCP_BASE, value: {{ include "sdcp.identity" . | quote }}}
{{- else }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
- {name: SDCP_LISTEN, value: {{ .listen | quote }}}
- {name: SDCP_TLS_DIR, value: /tls}
- {name: SDCP_TLS_NAME, value: {{ .role }}}
{{- if ne .role "router" }}
- {name: SDCP_ROUTERS, value: {{ include "sdcp.instances" (dict "root" $root "role" "router") | quote }}}
{{- end }}
{{- if ne .role "verifier" }}
- {name: SDCP_VERIFIERS, value: {{ include "sdcp.instances" (dict "root" $root "role" "verifier") | quote }}}
{{- end }}
{{- if ne .role "drafter" }}
{{- $pools := list }}
{{- range $name := include "sdcp.pools" $root | fromJson | keys | sortAlpha }}
{{- $pools = append $pools (include "sdcp.instances" (dict "root" $root "role" "drafter" "pool" $name)) }}
{{- end }}
- {name: SDCP_DRAFTERS, value: {{ join "," $pools | quote }}}
{{- end }}
{{- if eq .role "mlc" }}
{{- else }}
- {name: SDCP_CACHE, value: {{ include "sdcp.identity" (dict "root" $root "role" "mlc") | quote }}}
- {name: SDCP_DRAIN_SECONDS, value: {{ $root.Values.drainSeconds | quote }}}
{{- end }}
{{- end }}

{{/* Where logs and objects are. Passwords come from Secrets only. */}}
{{- define "sdcp.stores" }}
{{- $bucket := or (and .Values.log.url (not (hasPrefix "postgresql://" .Values.log.url))) .Values.objects.url }}
{{- with .Values.log.url }}
- {name: SDCP_LOG, value: {{ . | quote }}}
{{- end }}
{{- if .Values.log.passwordSecret.name }}
- name: PGPASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.log.passwordSecret.name }}, key: {{ .Values.log.passwordSecret.key }}}}
{{- end }}
{{- with .Values.objects.url }}
- {name: SDCP_OBJECTS, value: {{ . | quote }}}
{{- end }}
{{- if and $bucket .Values.bucket.credentialsSecret.name }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.bucket.credentialsSecret.name }}, key: {{ . }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* Numbers of YAML are floats here, and large ones would be written as 1e+06. */}}
{{- define "sdcp.setting" -}}
{{- if kindIs "slice" .value -}}{{ join "," .value | quote }}
{{- else if and (kindIs "float64" .value) (eq (floor .value) .value) -}}{{ int64 .value | quote }}
{{- else -}}{{ .value | quote }}
{{- end -}}
{{- end }}
