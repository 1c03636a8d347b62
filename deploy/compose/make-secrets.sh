#!/bin/sh
# Writes what compose.yaml mounts as secrets, once; what is there stays. Prints the API key that clients must show.
# usage: ./make-secrets.sh [mqmk.env]
set -eu
umask 077
. "./${1:-mqmk.env}"
folder=${SECRETS:-./secrets}
mkdir -p "$folder"
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
if [ -z "${S3_SECRET_KEY:-}" ]; then
    echo "S3_SECRET_KEY is empty in ${1:-mqmk.env}; this one is random: $(random)" >&2
    exit 1
fi
# Containers read these files as other users than you, so they are readable in a folder that is not.
umask 022
for name in database-password grafana-password; do
    [ -e "$folder/$name" ] || random > "$folder/$name"
done
if [ ! -e "$folder/api-keys" ]; then
    key=$(random)
    printf '%s' "$key" | sha256sum | cut -d' ' -f1 > "$folder/api-keys"
    echo "API key: $key"
fi
[ -e "$folder/store-users.json" ] || cat > "$folder/store-users.json" <<JSON
{"identities": [{"name": "mqmk", "actions": ["Admin", "Read", "List", "Tagging", "Write"],
  "credentials": [{"accessKey": "$S3_ACCESS_KEY", "secretKey": "$S3_SECRET_KEY"}]}]}
JSON
