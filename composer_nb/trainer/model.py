"""Models: the architecture, and loading and saving it as a Hugging Face checkpoint."""

from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.transformer import Model, ModelConfig

__all__ = ["Model", "ModelConfig", "load_pretrained", "save_pretrained"]
