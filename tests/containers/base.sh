#!/bin/bash
# Print a base image for the Dockerfile as a tar archive: Debian with Python and pip, made by debootstrap as root.
# In place of python:3.11-slim where no registry can be reached.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm --recursive --force "$folder"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3-pip,tini bookworm "$folder" "${MIRROR:-http://deb.debian.org/debian}" >&2
rm --recursive --force "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
tar --create --directory="$folder" --one-file-system .
