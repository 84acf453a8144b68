"""`transduce push`: publish a run folder on the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transduce.errors import RunFolderError, SettingsError, UserError
from transduce.evaluation.wording import WORDINGS
from transduce.runs.atomic import expecting, read_json
from transduce.runs.folder import RunFolder
from transduce.runs.hub import MODEL_NAME, hub_api, reason_of
from transduce.runs.manifest import NAME, WEIGHTS, check_file
from transduce.text.languages import base_language
from transduce.text.tokenizer import load_tokenizers

_CARD = "README.md"


def push_to_hub(
    run: str | Path,
    name: str,
    *,
    license: str | None = None,
    private: bool | None = None,
    records: bool = False,
    dry_run: bool = False,
) -> dict[str, int]:
    """Publish a run folder on the Hugging Face Hub; return the sizes of its files. `Translator.load(name)` loads it.

    The model's files, recipe and model card are sent. Other files that the model already has on the Hub are kept.

    Args:
        run: The run folder. No training may use it.
        name: OWNER/NAME of the model, which is created if it does not exist.
        license: Licence for the metadata of the card, such as mit or cc-by-4.0.
        private: Whether a new model is private (default: the owner's setting).
        records: Also send the report, scores, samples, metrics and facts about the data.
        dry_run: Send nothing.

    Raises:
        RunFolderError: The folder is missing, damaged or in use.
        UserError: The run has only adapters, huggingface_hub is missing, or the Hub refuses the model.
    """
    if not MODEL_NAME.fullmatch(name):
        raise SettingsError(f"name = '{name}': a model on the Hub is named OWNER/NAME, such as alice/en-de")
    with hub_api("publication") as api, RunFolder.open_locked(Path(run)) as folder:
        from huggingface_hub import CommitOperationAdd

        files = _files_to_send(folder, name, license=license, records=records)
        try:
            additions = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=x) for file, x in files.items()]
            if not dry_run:
                api.create_repo(name, private=private, exist_ok=True)
                api.create_commit(name, additions, commit_message="Publish a run folder of transduce")
        except Exception as error:  # errors of the library, of its HTTP client, or caused by the server's answer
            raise UserError(
                f"{api.endpoint} does not take {name}: {reason_of(error)} (writing needs a token: hf auth login, or "
                "HF_TOKEN)"
            ) from None
    return {addition.path_in_repo: addition.upload_info.size for addition in additions}


def _files_to_send(folder: RunFolder, name: str, *, license: str | None, records: bool) -> dict[str, bytes | Path]:
    """Return the content or path of each file to send. The sent manifest lists only the records that are sent."""
    run, manifest = folder.path, folder.manifest
    if folder.has_adapters:
        raise UserError(
            f"{run} has only adapters of the weights of {folder.settings.training.start}; transduce export {run} "
            "FOLDER --to peft writes them for the Hub"
        )
    listed = {file: was for file, was in manifest.records.items() if records and file != _CARD}
    if WEIGHTS not in manifest.files:
        raise RunFolderError(
            f"{run}: {NAME} does not list {WEIGHTS}: their replacement was cut short; resume the training"
        )
    for file, expected in (manifest.files | listed).items():
        check_file(run / file, expected)
    card = _card(folder, name, license).encode()
    fingerprint = {"sha256": hashlib.sha256(card).hexdigest(), "size": len(card)}
    sent = {**read_json(run / NAME), "records": {**listed, _CARD: fingerprint}}
    files: dict[str, bytes | Path] = {file: run / file for file in (*manifest.files, *listed, "recipe.toml")}
    return {**files, NAME: json.dumps(sent, indent=2).encode(), _CARD: card}


def _card(folder: RunFolder, name: str, license: str | None) -> str:
    """Return the model card with metadata for the Hub. Text that the card's author has written is kept."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    path, settings = folder.path / _CARD, folder.settings
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {name}\n"
    with expecting(path, YAMLError):
        card = ModelCard(text.replace("THIS_FOLDER", name))
    codes = load_tokenizers(folder).src.framing.languages or settings.data.named_languages
    metadata = {
        "language": sorted({base_language(code) for code in codes if code}),
        "library_name": "transduce",
        "pipeline_tag": WORDINGS[settings.task].pipeline,
    }
    for key, value in metadata.items():
        if value and not card.data.get(key):
            card.data[key] = value
    if license is not None:
        card.data["license"] = license
    return str(card)
