"""Protobuf messages from a compact table of field numbers, built when first asked for.

Generated modules refuse other protobuf runtimes than the one they were generated for; a file descriptor built at run
time works with protobuf 4 to 7 alike. A message is a mapping from field name to ``(number, type)``, where type is a
scalar's name (``"string"``, ``"int64"``, ...), ``"repeated T"``, ``"map<K,V>"`` with string keys, the name of another
message of the same :class:`Schema`, or ``".google.protobuf.Timestamp"``, ``".google.protobuf.Any"``,
``".google.protobuf.Empty"``, ``".google.protobuf.FieldMask"``. Unknown fields are kept and ignored, so a table lists
only what is used. Field numbers come from the published .proto files named where a schema is defined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    empty_pb2,
    field_mask_pb2,
    message_factory,
    timestamp_pb2,
)

_F = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _F.TYPE_DOUBLE,
    "float": _F.TYPE_FLOAT,
    "int64": _F.TYPE_INT64,
    "uint64": _F.TYPE_UINT64,
    "int32": _F.TYPE_INT32,
    "uint32": _F.TYPE_UINT32,
    "bool": _F.TYPE_BOOL,
    "string": _F.TYPE_STRING,
    "bytes": _F.TYPE_BYTES,
}
_WELL_KNOWN = (any_pb2, empty_pb2, field_mask_pb2, timestamp_pb2)

FieldTable = Mapping[str, tuple[int, str]]


class Schema:
    """Message classes of one protobuf package, in a descriptor pool of their own.

    ``schema["Name"]`` is the class; enums are declared as ``int32``, which has the same wire form.
    """

    def __init__(self, package: str, messages: Mapping[str, FieldTable]) -> None:
        pool = descriptor_pool.DescriptorPool()
        file = descriptor_pb2.FileDescriptorProto(name=f"weenv/{package}.proto", package=package, syntax="proto3")
        for module in _WELL_KNOWN:
            pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
            file.dependency.append(module.DESCRIPTOR.name)
        for name, fields in messages.items():
            self._message(file.message_type.add(name=name), package, name, fields)
        pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
        self._pool = pool
        self._package = package
        self._classes: dict[str, Any] = {}

    def _message(self, message: descriptor_pb2.DescriptorProto, package: str, name: str, fields: FieldTable) -> None:
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number, label=_F.LABEL_OPTIONAL)
            if kind.startswith("repeated "):
                field.label = _F.LABEL_REPEATED
                kind = kind.removeprefix("repeated ")
            elif kind.startswith("map<"):
                key, value = kind[4:-1].split(",")
                entry_name = "".join(part.capitalize() for part in field_name.split("_")) + "Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                self._type(entry.field.add(name="key", number=1, label=_F.LABEL_OPTIONAL), package, key.strip())
                self._type(entry.field.add(name="value", number=2, label=_F.LABEL_OPTIONAL), package, value.strip())
                field.label = _F.LABEL_REPEATED
                field.type = _F.TYPE_MESSAGE
                field.type_name = f".{package}.{name}.{entry_name}"
                continue
            self._type(field, package, kind)

    @staticmethod
    def _type(field: descriptor_pb2.FieldDescriptorProto, package: str, kind: str) -> None:
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            field.type = scalar
        else:
            field.type = _F.TYPE_MESSAGE
            field.type_name = kind if kind.startswith(".") else f".{package}.{kind}"

    def __getitem__(self, name: str) -> Any:
        # Classes are made when first asked for: a command line uses a few of many. Raises KeyError for an unknown name.
        found = self._classes.get(name)
        if found is None:
            full = name[1:] if name.startswith(".") else f"{self._package}.{name}"
            found = self._classes[name] = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full))
        return found
