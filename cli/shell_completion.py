"""Completion in bash, zsh and fish: what click gives, and what these shells want besides.

bash takes ``tag:best`` and ``1000@2`` apart at the signs in COMP_WORDBREAKS, and puts in place of the last part what it
is given. So the script hands over the line as it was typed, and cuts off what bash has already. zsh and fish take a
word as a word, also ``--like=5@3``, of which click completes what follows the sign. Nothing that has to be gone on with
(``1@1..``, ``last:``) is followed by a space.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

__all__ = ["LINE", "register"]

LINE: Final = "CKPT_COMP_LINE"
"""Environment variable: what is typed, up to the cursor."""
_SCRIPT: Final = """\
%(complete_func)s() {
    local IFS=$'\\n'
    local line="${COMP_LINE:0:COMP_POINT}" breaks="" prefix="" sign word completion type value
    word="${line##*[[:space:]]}"
    [[ $word == --*=* ]] && word="${word#--*=}"
    for sign in : = @; do
        [[ $COMP_WORDBREAKS == *"$sign"* ]] && breaks+="$sign"
    done
    # What bash takes for words of their own stays as it is: it replaces what follows the last of these signs.
    [[ -n $breaks && $word == *[$breaks]* ]] && prefix="${word%%"${word##*[$breaks]}"}"
    prefix="${prefix%%@}" # this sign belongs to what follows it
    COMPREPLY=()
    for completion in $(env @LINE@="$line" %(complete_var)s=bash_complete "$1"); do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            [[ $value == */ || $value == *.. || $value == *: ]] && compopt -o nospace
            COMPREPLY+=("${value#"$prefix"}")
        fi
    done
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_ZSH: Final = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a finished unfinished described response
    local type key descr
    (( ! $+commands[%(prog_name)s] )) && return 1

    local call="%(complete_var)s=zsh_complete"
    response=("${(@f)$(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) env $call %(prog_name)s)}")
    compset -P 1 '--*=' # an option's value is completed without the option

    for type key descr in ${response}; do
        if [[ "$type" == "dir" ]]; then
            _path_files -/
        elif [[ "$type" == "file" ]]; then
            _path_files -f
        elif [[ "$type" != "plain" ]]; then
            continue
        elif [[ "$descr" != "_" ]]; then
            described+=("$key":"$descr")
        elif [[ "$key" == *(..|:|/) ]]; then
            unfinished+=("$key")
        else
            finished+=("$key")
        fi
    done

    (( $#described )) && _describe -V unsorted described -U -i "$IPREFIX"
    (( $#finished )) && compadd -U -i "$IPREFIX" -V unsorted -a finished
    (( $#unfinished )) && compadd -U -i "$IPREFIX" -S '' -V unfinished -a unfinished
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@" # from a folder of $fpath
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH: Final = """\
function %(complete_func)s
    set -l typed (commandline -t)
    set -l option (string match -r -- '^--[^=]+=' $typed)
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD="$typed" %(prog_name)s)

    for completion in $response
        set -l parts (string split -m 1 "," -- $completion)

        if test "$parts[1]" = dir
            string replace -r -- '^' "$option" (__fish_complete_directories $parts[2])
        else if test "$parts[1]" = file
            string replace -r -- '^' "$option" (__fish_complete_path $parts[2])
        else if test "$parts[1]" = plain
            printf '%%s\\n' "$option$parts[2]"
        end
    end
end

complete --no-files --keep-order --command %(prog_name)s --arguments "(%(complete_func)s)"
"""
_PLAIN: Final = re.compile(r"[\w./@%+=:,-]*\Z")
"""A path that a shell needs no quotes for. bash itself completes any other."""


class _Bash(BashComplete):
    source_template = _SCRIPT.replace("@LINE@", LINE)

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one at the cursor, and that one; as click does it for a script of its own."""
        line = os.environ.get(LINE)
        if line is None:
            return super().get_completion_args()
        words = split_arg_string(line)
        incomplete = "" if not words or line[-1:].isspace() else words.pop()
        return words[1:], incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        """Folders become what is in them: stores, and folders where there may be some."""
        found: list[CompletionItem[Any]] = []
        for item in super().get_completions(args, incomplete):
            found += _folders(item.value) if item.type == "dir" else [item]
        return found


class _Zsh(ZshComplete):
    source_template = _ZSH

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """As click does since 8.1.8: `_describe` ends a value at the first colon that is not escaped."""
        value = item.value.replace(":", r"\:") if item.help else item.value
        return f"{item.type}\n{value}\n{item.help or '_'}"


class _Fish(FishComplete):
    source_template = _FISH


def _folders(typed: str) -> list[CompletionItem[Any]]:
    above, _, name = typed.rpartition("/")
    try:
        folders = sorted(
            entry for entry in Path(f"{above}/" if "/" in typed else ".").iterdir() if entry.name.startswith(name)
        )
        shown = [entry for entry in folders if entry.is_dir() and (name.startswith(".") or entry.name[0] != ".")]
    except OSError:
        shown = []
    values = [f"{typed[: len(typed) - len(name)]}{entry.name}" for entry in shown]
    if not values or not all(map(_PLAIN.match, values)):
        return [CompletionItem(typed, type="dir")]
    return [
        CompletionItem(value if (entry / "FORMAT").is_file() else f"{value}/")
        for value, entry in zip(values, shown, strict=True)
    ]


def register() -> None:
    """Have click use these."""
    for kind in (_Bash, _Zsh, _Fish):
        add_completion_class(kind)
