"""What a running command says, above its progress bar."""

from tqdm import tqdm


def say(text: str) -> None:
    """Prints a line; it is lost where the output goes to a full disk, which work outlives.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    try:
        tqdm.write(text)
    except BrokenPipeError:
        raise
    except OSError:
        return
