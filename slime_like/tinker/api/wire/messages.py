"""Protobuf messages of the wire: fields by their numbers, as public clients have them (`tinker_public`).

Built when imported, in a pool of their own: a process that has the client library too holds both. Only what a server
reads or writes is here; fields that it does not know are skipped by protobuf itself.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto

#: Message -> its fields as "number name type", with "repeated", "optional" or "map" before the type (maps are from
#: strings), and "one" before what excludes its like.
_SCHEMA: dict[str, tuple[str, ...]] = {
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense one bytes", "2 sparse_csr one SparseCsr", "3 dtype DType", "4 shape repeated int64"),
    "EncodedTextChunk": ("1 tokens bytes",),
    "ImageChunk": ("1 data bytes", "2 format string"),
    "DmelChunk": ("1 dmel bytes",),
    "Chunk": ("1 encoded_text one EncodedTextChunk", "2 image one ImageChunk", "3 dmel one DmelChunk"),
    "Datum": ("1 model_input repeated Chunk", "2 loss_fn_inputs map Tensor"),
    "LossConfigValue": ("1 number one double", "2 text one string"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data repeated Datum",
        "4 loss_fn string",
        "5 loss_fn_config map double",
        "6 forward_only bool",
        "7 loss_fn_config_v2 map LossConfigValue",
    ),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype DType", "4 trailing_shape repeated int64"),
    "ArrayRecord": ("1 type_tag string", "2 fields map BatchedTensor", "3 num_datums int64"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs repeated ArrayRecord",
        "3 metrics map double",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SampledSequence": (
        "1 stop_reason StopReason",
        "2 tokens bytes",
        "3 logprobs optional bytes",
        "4 topk_sampled_logprobs optional TopkLogprobs",
    ),
    "SampleResponse": (
        "1 sequences repeated SampledSequence",
        "2 prompt_logprobs optional bytes",
        "3 topk_prompt_logprobs optional TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
        "5 target_prompt_logprobs optional Tensor",
    ),
}

_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
_PACKAGE = "tinker_public"


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCHEMA or kind in _ENUMS:
        field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _add_map(message: Any, field: Any, kind: str) -> None:
    """A map is a repeated message of key and value, of a name that protobuf derives from the field's."""
    entry = message.nested_type.add(name="".join(part.capitalize() for part in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
    field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _add_field(message: Any, text: str) -> None:
    number, name, *how, kind = text.split()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if how == ["map"]:
        _add_map(message, field, kind)
        return
    _set_type(field, kind)
    if how == ["repeated"]:
        field.label = _Field.LABEL_REPEATED
    elif how == ["one"]:
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0
    elif how == ["optional"]:  # proto3 keeps whether it is there by a group of one
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="slime_like/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for text in fields:
            _add_field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


#: Message name -> its class.
MESSAGES = _build()

FLOAT32, INT64, INT32, BFLOAT16 = range(1, 5)  # DType
STOP_REASONS = {"stop": 0, "length": 1}  # StopReason
