"Shows what every head of any model sees, and whether that was promised."
from .report import Examination, Finding, examine

__all__ = ['Examination', 'Finding', 'examine']
