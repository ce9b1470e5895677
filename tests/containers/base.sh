#!/bin/bash
# Write a base image for the Dockerfile to FILE, a tar archive: Debian with Python and pip, made by debootstrap as root,
# in place of python:3.11-slim where no registry can be reached. A mirror that takes longer than two minutes is none.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm --recursive --force "$folder"' EXIT
options=(--variant=minbase "--include=ca-certificates,python3-pip,tini")
timeout 120 debootstrap "${options[@]}" --download-only bookworm "$folder" >&2 ||
  { echo "Debian could not be downloaded within 120 s" >&2 && exit 1; }
debootstrap "${options[@]}" bookworm "$folder" >&2
rm --recursive --force "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
tar --create --file="$1" --directory="$folder" --one-file-system .
