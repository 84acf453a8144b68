"""An ONNX graph, written node by node in the order of computation. A value is its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

OPSET = 20
"""Of the standard operators; onnxruntime has had it since 1.17."""

LARGEST = 1 << 30
"""Bytes of weights from which on they lie in a file beside the graph: a protobuf holds two gigabytes."""

TYPES = {"float": TensorProto.FLOAT, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}

Axes = Sequence[int | str]
"""A shape: numbers, and names of what is only known when the graph runs."""


class Graph:
    """Nodes, weights, inputs and outputs. A weight is stored once, however often it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: the model's, under its own names, which the graph keeps."""
        self._tensors = tensors
        self._nodes: list[onnx.NodeProto] = []
        self._stored: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output."""
        return self.split(kind, *inputs, n=1, **attributes)[0]

    def split(self, kind: str, *inputs: str, n: int, **attributes: Any) -> list[str]:
        """A node with n outputs."""
        outputs = [f"v{len(self._nodes)}.{i}" for i in range(n)]
        self._nodes.append(helper.make_node(kind, inputs, outputs, f"{kind}_{len(self._nodes)}", **attributes))
        return outputs

    def constant(self, values: Any, dtype: type = np.int64) -> str:
        """Numbers that are no weights."""
        array: np.ndarray = np.asarray(values, dtype)
        name = f"{array.dtype}{array.tolist()}" if array.size <= 8 else f"constant{len(self._stored)}"
        return self._store(name, array)

    def has(self, name: str) -> bool:
        """Whether the model has a weight of this name: biases may lack."""
        return name in self._tensors

    def weight(self, name: str, *, transposed: bool = False) -> str:
        """A weight of the model; `transposed`: as the right side of a product wants it."""
        value = self._tensors[name].detach().cpu().float().numpy()
        return self._store(f"{name}.T" if transposed else name, value.T if transposed else value)

    def input(self, name: str, kind: str, axes: Axes) -> str:
        """What is given to the graph; `kind`: one of TYPES."""
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[kind], list(axes)))
        return name

    def output(self, name: str, value: str, axes: Axes) -> None:
        """Give a value (float) out under this name."""
        self._nodes.append(helper.make_node("Identity", [value], [name], f"give_{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(axes)))

    def save(self, path: Path) -> tuple[list[str], list[str]]:
        """Write the graph, checked, and tell the names of its inputs and outputs; many weights go beside it."""
        graph = helper.make_graph(
            self._nodes, path.stem, self._inputs, self._outputs, initializer=list(self._stored.values())
        )
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(
            graph, producer_name="transduce", opset_imports=[opset], ir_version=helper.find_min_ir_version_for([opset])
        )
        beside = sum(len(tensor.raw_data) for tensor in self._stored.values()) >= LARGEST
        onnx.save_model(model, str(path), save_as_external_data=beside, location=f"{path.stem}.weights")
        onnx.checker.check_model(str(path), full_check=True)
        return [one.name for one in self._inputs], [one.name for one in self._outputs]

    def _store(self, name: str, array: np.ndarray) -> str:
        if name not in self._stored:
            self._stored[name] = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        return name
