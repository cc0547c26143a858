{{/* One pod for all roles. A dict: `root`, `role`, `pool`, `values` (the role's) and `data` (volume source; none: a claim). */}}
{{- define "sdcp.pod" -}}
{{- $root := .root -}}
{{- $v := .values -}}
{{- $http := has .role (list "router" "all-in-one") -}}
{{- $split := ne .role "all-in-one" -}}
metadata:
  labels: {{- include "sdcp.select" . | nindent 4 }}
  {{- with $v.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "sdcp.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false # they would set SDCP_..._PORT in releases called sdcp
  terminationGracePeriodSeconds: {{ include "sdcp.grace" . }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $split }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "sdcp.select" . | nindent 10 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int64 $root.Values.security.runAsUser }}
    runAsGroup: {{ int64 $root.Values.security.runAsGroup }}
    fsGroup: {{ int64 $root.Values.security.fsGroup }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- if and $split (eq $root.Values.tls.source "generated") }}
  initContainers:
    - name: certificate # Helm can't make certificates that name a URI, so each pod makes its own with the CA
      image: {{ include "sdcp.image" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      workingDir: /tmp
      command:
        - sdcp-mono
        - certs
        - init
        - /tls
        - --ca=/ca
        - --pool={{ .role }}={{ include "sdcp.identity" . }}
      env:
        - {name: HOME, value: /tmp}
      resources: {requests: {cpu: 100m, memory: 256Mi}, limits: {memory: 512Mi}}
      securityContext: {{- include "sdcp.restricted" . | nindent 8 }}
      volumeMounts:
        - {name: ca, mountPath: /ca, readOnly: true}
        - {name: tls, mountPath: /tls}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "sdcp.image" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      workingDir: /data
      {{- include "sdcp.command" . | nindent 6 }}
      env: {{- include "sdcp.env" . | nindent 8 }}
      ports:
        - {name: {{ $http | ternary "http" "status" }}, containerPort: {{ $http | ternary 8000 9090 }}}
        {{- if $split }}
        - {name: grpc, containerPort: 9443}
        {{- end }}
      {{- include "sdcp.probes" (dict "port" ($http | ternary "http" "status") "startup" $root.Values.probes.startupSeconds) | nindent 6 }}
      {{- if $http }}
      lifecycle: # until load balancers know that the pod ends, it still takes requests
        preStop:
          exec:
            command: [sleep, "5"]
      {{- end }}
      resources: {{- include "sdcp.resources" $v | nindent 8 }}
      securityContext: {{- include "sdcp.restricted" . | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: tmp, mountPath: /tmp}
        {{- if $split }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
        {{- if $v.shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if and $root.Values.model.existingClaim (ne .role "mlc") }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    {{- with .data }}
    - name: data
      {{- toYaml . | nindent 6 }}
    {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    {{- with $v.shm }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .size }}}
    {{- end }}
    {{- if and $root.Values.model.existingClaim (ne .role "mlc") }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $root.Values.model.existingClaim }}, readOnly: true}
    {{- end }}
    {{- if $split }}
    {{- include "sdcp.tlsVolumes" . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "sdcp.image" -}}
{{- $image := .root.Values.image -}}
{{- $gpu := gt (int (dig "gpu" "count" 0 .values)) 0 -}}
{{- $digest := $gpu | ternary $image.cudaDigest $image.digest -}}
{{- if $digest -}}
{{ printf "%s@%s" $image.repository $digest | quote }}
{{- else -}}
{{ printf "%s:%s%s" $image.repository (default .root.Chart.AppVersion $image.tag) ($gpu | ternary "-cuda" "") | quote }}
{{- end -}}
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: preStop and streams that are being read, or sessions that move, and some to spare. */}}
{{- define "sdcp.grace" -}}
{{- if has .role (list "router" "all-in-one") -}}60{{- else if eq .role "mlc" -}}30{{- else -}}{{ add 25 (ceil .root.Values.drainSeconds) }}{{- end -}}
{{- end }}

{{/* Pods of Deployments are known by their address: 10.1.2.3 is https://10-1-2-3.SERVICE/. */}}
{{- define "sdcp.command" -}}
{{- if has .role (list "router" "drafter") -}}
command: [/bin/sh, -ec]
args:
  - |
    export SDCP_BASE="https://$(echo "$POD_IP" | sed -e 's/[.:]/-/g').{{ include "sdcp.host" . }}:9443/"
    exec sdcp-mono {{ .role }}
{{- else -}}
command: {{ get (dict "verifier" "[sdcp-mono, verifier]" "mlc" "[sdcp-mono, cache, serve]" "all-in-one" "[sdcp-mono, serve]") .role }}
{{- end -}}
{{- end }}

{{- define "sdcp.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "sdcp.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- $gpus := int (dig "gpu" "count" 0 .) -}}
{{- if $gpus -}}
{{- $_ := set $resources "limits" (set (default dict $resources.limits) .gpu.resource $gpus) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Alive as soon as the process answers, whatever it is loading; ready when it has loaded. */}}
{{- define "sdcp.probes" -}}
startupProbe:
  httpGet: {path: /health/live, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .startup) 4) 5 }}
livenessProbe: # loading may hold the interpreter for seconds: only a minute of silence ends a pod
  httpGet: {path: /health/live, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{- define "sdcp.tlsVolumes" -}}
{{- if eq .root.Values.tls.source "generated" -}}
- name: tls
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: ca
  secret:
    secretName: {{ include "sdcp.fullname" .root }}-ca
    defaultMode: 0440
    items:
      - {key: tls.crt, path: ca.pem}
      - {key: tls.key, path: ca-key.pem}
{{- else -}}
- name: tls # not by subPath, so that a renewed certificate arrives
  secret:
    secretName: {{ include "sdcp.secret" . }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.pem}
      - {key: tls.crt, path: {{ .role }}.pem}
      - {key: tls.key, path: {{ .role }}-key.pem}
{{- end -}}
{{- end }}
