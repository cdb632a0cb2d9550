"""Find the GGUF files that lie in a folder in place of a Hugging Face model. No torch. Reads names alone."""

from pathlib import Path

from gpu.model.gguf.file import part_number


def find_gguf_files(folder: Path) -> list[Path]:
    """Return the folder's GGUF files by name, of one in parts the first."""
    return [path for path in sorted(folder.glob("*.gguf")) if part_number(path) == 1]


def model_path(path: Path) -> Path:
    """Return the one GGUF file of a folder that has no config.json, or else `path` as it is."""
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    files = find_gguf_files(path)
    return files[0] if len(files) == 1 else path


def name_gguf_files(folder: Path) -> str:
    """Return what an error says of a folder's GGUF files, or "" where it has none."""
    names = [path.name for path in find_gguf_files(folder)]
    if not names:
        return ""
    return f"; name the file, as {folder / names[0]}" + (f" (there are {', '.join(names)})" if len(names) > 1 else "")
