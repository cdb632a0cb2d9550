"""Register methods that the laboratory scores in the reference decoder, beside the baselines of the evaluations."""

from evals.methods.baselines import METHODS, parse_method
from evals.tuning.mac_method import Mac
from lab.methods.h2o import H2O
from lab.methods.sampled import Sampled
from lab.methods.snapkv import SnapKV
from lab.methods.vattention import VAttention

__all__ = ["Mac", "Sampled", "parse_method"]

METHODS.update({method.name: method for method in (Sampled, Mac, H2O, SnapKV, VAttention)})
