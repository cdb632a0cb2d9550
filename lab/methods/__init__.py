"""Register methods that the laboratory scores in the reference decoder, beside the baselines of the evaluations."""

from evals.methods.baselines import METHODS, parse_method
from evals.tuning.mac_method import Mac
from lab.methods.predicted import Predicted
from lab.methods.sampled import Sampled

__all__ = ["Mac", "Predicted", "Sampled", "parse_method"]

METHODS.update({method.name: method for method in (Sampled, Mac, Predicted)})
