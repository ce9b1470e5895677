#compdef dora
# Completion of dora in zsh: save this file as _dora in a folder of $fpath, or source it after compinit.

_dora() {
    local adds word meaning
    local -a found shown open open_shown
    {
        read -r adds
        while IFS=$'\t' read -r word meaning; do
            if [[ $word == *[=.] ]]; then
                open+=("$word")
                open_shown+=("${word}${meaning:+  $meaning}")
            else
                found+=("$word")
                shown+=("${word}${meaning:+  $meaning}")
            fi
        done
    } < <("${(Q)words[1]/#\~/$HOME}" --complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    (( $#found )) && compadd -l -d shown -a found
    (( $#open )) && compadd -l -S '' -d open_shown -a open
    if [[ $adds == files ]]; then
        compset -P '*='
        _files
    fi
}
if [[ $funcstack[1] == _dora ]]; then
    _dora "$@"
else
    compdef _dora dora
fi
