# SPDX-License-Identifier: Apache-2.0
"""Sending the final model to the Hugging Face hub, by the hub's own client."""

from pathlib import Path


def check_hub(repository: str) -> None:
    """Find out before a run whether its model could be sent.

    Raises:
        ValueError: nobody is logged in, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:
        raise ValueError(
            f"run.push_to_hub is {repository!r}, but the hub does not know who you are ({_first_line(error)}); log in "
            f"with `hf auth login`, or set HF_TOKEN"
        ) from error


def push(folder: Path, repository: str) -> str:
    """Send a folder, making the repository if need be; returns its address.

    Raises:
        ValueError: it was not sent; the folder is where it was, and the message says how to send it by hand.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Trained with logra")
    except Exception as error:
        raise ValueError(
            f"the model was not sent to {repository!r} ({_first_line(error)}); it is in {folder}. Send it with "
            f"`hf upload {repository} {folder}`"
        ) from error
    return str(address)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
