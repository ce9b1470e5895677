"""Entry point of `dora` and `python -m dora`.

Invariant: Ctrl-C at any time, even during imports, ends the process with exit code 130 and no traceback.
"""

import os
import signal
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        _open_streams()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # dora.jobs starts commands with it blocked
        if sys.argv[1:2] == ["--complete"]:  # at every Tab in a shell: nothing else is imported
            from dora.completion.complete import main as complete

            complete(sys.argv[2:])
            return
        from dora.cli.app import main as command_line

        command_line()
    except KeyboardInterrupt:
        _end()
    except SystemExit as ending:
        if ending.code == _INTERRUPTED:
            _end()
        raise


def _open_streams() -> None:
    """Open what the caller has closed of the standard streams as /dev/null; other files would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(file, True)
            setattr(sys, name, os.fdopen(file, mode))


def _end() -> None:
    """Exit at once, without waiting for a thread that may still be loading a model."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
