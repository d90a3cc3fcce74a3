"""Our messages are the client library's."""

from tinker.proto import tinker_public_pb2

from slime_like.tinker.api.wire.messages import BFLOAT16, FLOAT32, INT32, INT64, MESSAGES, STOP_REASONS

#: Of the library, read by nobody here: images' sizes, where tokens were sampled, and answers that are not given.
NOT_READ = {
    "Datum": {"model_input_spans", "loss_fn_input_spans"},
    "ImageChunk": {"expected_tokens", "override_dimensions"},
    "SampleResponse": {"prompt_alt_tokens"},
}


def fields(descriptor) -> dict[str, tuple]:
    """Name -> number, kind, whether repeated, and what it is of."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.message_type.name if field.message_type else None,
            field.enum_type.name if field.enum_type else None,
        )
        for field in descriptor.fields
    }


def test_fields_are_those_of_the_library():
    theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name
    for name, message in MESSAGES.items():
        expected = {key: value for key, value in fields(theirs[name]).items() if key not in NOT_READ.get(name, ())}
        assert fields(message.DESCRIPTOR) == expected, name
        for entry in message.DESCRIPTOR.nested_types:
            assert fields(entry) == fields(theirs[name].nested_types_by_name[entry.name]), entry.full_name
            assert entry.GetOptions().map_entry


def test_what_excludes_its_like_does_so_in_the_library():
    theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name
    for name, message in MESSAGES.items():
        groups = {tuple(f.name for f in group.fields) for group in theirs[name].oneofs}
        for group in message.DESCRIPTOR.oneofs:
            assert tuple(field.name for field in group.fields) in groups, name


def test_numbers_of_enums():
    kinds = tinker_public_pb2.DType
    assert (FLOAT32, INT64, INT32, BFLOAT16) == (
        kinds.Value("DTYPE_FLOAT32"),
        kinds.Value("DTYPE_INT64"),
        kinds.Value("DTYPE_INT32"),
        kinds.Value("DTYPE_BFLOAT16"),
    )
    reasons = tinker_public_pb2.StopReason
    assert STOP_REASONS == {
        "stop": reasons.Value("STOP_REASON_STOP"),
        "length": reasons.Value("STOP_REASON_LENGTH"),
    }
