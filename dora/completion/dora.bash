# Completion of dora in bash: source this file, or save it as ~/.local/share/bash-completion/completions/dora

_dora() {
    local adds line
    COMPREPLY=()
    {
        read -r adds
        while IFS= read -r line; do
            COMPREPLY+=("${line%%$'\t'*}")
        done
    } < <("${1/#\~/$HOME}" --complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    if [[ $adds == files ]]; then
        compopt -o default
    fi
    if [[ ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace
    fi
}
complete -F _dora dora
