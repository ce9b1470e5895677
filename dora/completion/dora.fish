# Completion of dora in fish: save this file as ~/.config/fish/completions/dora.fish

function __dora_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($words[1] --complete fish $words[2..-1] "$current" 2>/dev/null)
    for line in $found[2..-1]
        echo $line
    end
    if test "$found[1]" = files
        set -l key (string replace -r '[^=]*$' '' -- "$current")
        for path in (__fish_complete_path (string replace -r '^.*=' '' -- "$current"))
            echo $key$path
        end
    end
end

complete -c dora -f -a '(__dora_complete)'
