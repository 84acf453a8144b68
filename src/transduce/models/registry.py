"""The table of architectures, ARCHITECTURES, and `build_model`, which makes a model from settings.

To add an architecture, add its settings to `transduce.config.architectures`, a module to this package, an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from transduce.config.architectures import MODEL_SETTINGS, resolve_preset
from transduce.config.model import ModelSettings, OutputSettings
from transduce.errors import RunFolderError, SettingsError, check_known
from transduce.models.causal_lm import CausalLM
from transduce.models.convs2s import CONVS2S_OPTIONS, ConvS2S
from transduce.models.masked_lm import POOLING_OPTIONS, Classifier, MaskedLM, PooledEncoder
from transduce.models.parts import DECODER_OPTIONS, ENCODER_OPTIONS, head_problems, stack_problems, unused_by_stacks
from transduce.models.rnn import RECURRENT_OPTIONS, RecurrentModel, recurrent_problems, unused_by_rnn
from transduce.models.star import CLASSIFIER_OPTIONS, STAR_OPTIONS, StarClassifier, StarTransformer
from transduce.models.transformer import TRANSFORMER_OPTIONS, Transformer, transformer_problems
from transduce.models.transformer_xl import TRANSFORMER_XL_OPTIONS, TransformerXL
from transduce.runs.tensor_file import StoredTensor


@dataclass(frozen=True, slots=True)
class Architecture:
    """An entry of ARCHITECTURES. `MODEL_SETTINGS` has the settings class of the same name, with presets and task.

    build: function that makes the model from settings and the sizes `n_src` and `n_tgt` of the vocabularies.
    shape: the stacks that the model has.
    family: models of one family name their common weights alike, so that one can be fine-tuned from another.
    options: for each setting that names an option, the table of allowed values.
    problems: function that returns inconsistencies of settings, each as a clause of an error message.
    unused: function that returns changed settings without effect, as such clauses; only new runs refuse them.
    of_blocks: whether the model consists of Transformer blocks, as `training.lora` and `training.recompute` need.
    """

    build: Callable[..., nn.Module]
    shape: Literal["encoder-decoder", "decoder", "encoder"]
    family: str
    options: Mapping[str, Mapping[str, Any]]
    problems: Callable[[Any], Iterable[str]] = lambda s: ()
    unused: Callable[[Any], Iterable[str]] = lambda s: ()
    of_blocks: bool = False


_STACKS: dict[str, Any] = {"problems": stack_problems, "unused": unused_by_stacks}
_BERT: dict[str, Any] = {**_STACKS, "shape": "encoder", "family": "BERT", "of_blocks": True}

ARCHITECTURES: dict[str, Architecture] = {
    "transformer": Architecture(
        Transformer,
        shape="encoder-decoder",
        family="Transformer",
        options=TRANSFORMER_OPTIONS,
        problems=transformer_problems,
        unused=unused_by_stacks,
        of_blocks=True,
    ),
    "convs2s": Architecture(ConvS2S, shape="encoder-decoder", family="ConvS2S", options=CONVS2S_OPTIONS),
    "star": Architecture(StarTransformer, shape="encoder-decoder", family="Star", options=STAR_OPTIONS, **_STACKS),
    "rnn": Architecture(
        RecurrentModel,
        shape="encoder-decoder",
        family="RNN",
        options=RECURRENT_OPTIONS,
        problems=recurrent_problems,
        unused=unused_by_rnn,
    ),
    "gpt": Architecture(CausalLM, shape="decoder", family="GPT", options=DECODER_OPTIONS, of_blocks=True, **_STACKS),
    "transformer-xl": Architecture(
        TransformerXL, shape="decoder", family="Transformer-XL", options=TRANSFORMER_XL_OPTIONS, problems=head_problems
    ),
    "bert": Architecture(MaskedLM, **_BERT, options=ENCODER_OPTIONS),
    "bert-encoder": Architecture(PooledEncoder, **_BERT, options=POOLING_OPTIONS),
    "bert-classifier": Architecture(Classifier, **_BERT, options=POOLING_OPTIONS),
    "star-classifier": Architecture(
        StarClassifier, shape="encoder", family="Star classifier", options=CLASSIFIER_OPTIONS, problems=head_problems
    ),
}
"""All architectures, by the value of the setting `model.kind`."""
assert ARCHITECTURES.keys() == MODEL_SETTINGS.keys()


def check_model(settings: ModelSettings) -> None:
    """Raise `SettingsError` if an option's value is unknown or sizes are inconsistent."""
    architecture = ARCHITECTURES[settings.kind]
    for field, table in architecture.options.items():
        check_known(f"model.{field}", getattr(settings, field), table)
    for problem in architecture.problems(settings):
        raise SettingsError(f"{problem}; change one of them")


def build_model(settings: ModelSettings, *, n_src: int, n_tgt: int) -> nn.Module:
    """Build a model for vocabularies of n_src and n_tgt tokens; PyTorch's default generator draws its weights."""
    settings = resolve_preset(settings)
    check_model(settings)
    architecture = ARCHITECTURES[settings.kind]
    is_pair = architecture.shape == "encoder-decoder" and n_src != n_tgt
    if is_pair and isinstance(settings, OutputSettings) and settings.ties_inputs:
        raise SettingsError(
            f"model.tie = '{settings.tie}' needs tokenizer.joint = true; separate vocabularies need 'two_way' or 'none'"
        )
    return architecture.build(settings, n_src=n_src, n_tgt=n_tgt)


def build_from(
    settings: ModelSettings, weights: Mapping[str, np.ndarray | StoredTensor], *, n_src: int, n_tgt: int, origin: object
) -> nn.Module:
    """Build a model with the given weights; raise `RunFolderError` if their names or shapes do not fit the settings.

    Names and shapes are compared before any memory is allocated for the model. Stored weights are read one by one.
    `origin`: where the weights come from, for the error.
    """
    with torch.device("meta"), Uninitialized():
        empty = build_model(settings, n_src=n_src, n_tgt=n_tgt)
    expected = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in expected | shapes:
        if shapes.get(name) != expected.get(name):
            there, here = (str(list(s[name])) if name in s else "missing" for s in (shapes, expected))
            raise RunFolderError(f"{origin} does not fit the settings: {name} is {there}, expected {here}")
    with Uninitialized():
        model = build_model(settings, n_src=n_src, n_tgt=n_tgt)
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.from_numpy(np.asarray(weights[name])))
    return model


class Uninitialized(TorchFunctionMode):
    """Context manager that skips the random initialization of weights, as they will be replaced.

    On the meta device, random initialization would also import PyTorch's compiler.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.__name__.endswith(("normal_", "uniform_")):  # methods of `Tensor` or functions of `nn.init`
            return args[0] if args else (kwargs or {})["tensor"]
        return function(*args, **(kwargs or {}))


def count_parameters(model: nn.Module) -> int:
    """Count the trainable parameters of a model; shared parameters count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
