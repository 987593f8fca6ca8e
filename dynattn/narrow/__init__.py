"A pretrained model learns how far its heads look: what it still recalls, and what each share costs."
from .recall import Recall, recall_grid

__all__ = ['Recall', 'recall_grid']
