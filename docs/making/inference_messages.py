"""Compiles src/quietmax/server/inference.proto to inference.binpb beside it; installing needs no compiler."""

from __future__ import annotations

from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).parents[2] / "src" / "quietmax" / "server"


def compile_messages(output: Path) -> None:
    """Write the descriptors of all messages.

    Parameters
    ----------
    output : Path
        The file to write.
    """
    options = [f"--proto_path={FOLDER}", f"--descriptor_set_out={output}", "inference.proto"]
    if protoc.main(["protoc", *options]) != 0:
        raise SystemExit("inference.proto could not be compiled.")


if __name__ == "__main__":
    compile_messages(FOLDER / "inference.binpb")
