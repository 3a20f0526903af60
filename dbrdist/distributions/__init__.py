"""Probability distributions, differentiable in their parameters."""

from dbrdist.core.names.constructors import explain_constructors as _explain_constructors
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.distributions import divergences as _divergences  # noqa: F401 - registers them
from dbrdist.distributions.continuous import Beta as Beta
from dbrdist.distributions.continuous import Chisquare as Chisquare
from dbrdist.distributions.continuous import Exponential as Exponential
from dbrdist.distributions.continuous import Gamma as Gamma
from dbrdist.distributions.continuous import Pareto as Pareto
from dbrdist.distributions.continuous import Uniform as Uniform
from dbrdist.distributions.discrete import Bernoulli as Bernoulli
from dbrdist.distributions.discrete import Categorical as Categorical
from dbrdist.distributions.discrete import Geometric as Geometric
from dbrdist.distributions.discrete import OneHotCategorical as OneHotCategorical
from dbrdist.distributions.discrete import Poisson as Poisson
from dbrdist.distributions.location_scale import Cauchy as Cauchy
from dbrdist.distributions.location_scale import Gumbel as Gumbel
from dbrdist.distributions.location_scale import Laplace as Laplace
from dbrdist.distributions.location_scale import LogNormal as LogNormal
from dbrdist.distributions.location_scale import Normal as Normal
from dbrdist.distributions.multivariate import Dirichlet as Dirichlet
from dbrdist.distributions.multivariate import Independent as Independent
from dbrdist.distributions.multivariate import MultivariateNormal as MultivariateNormal

_explain_constructors(globals())
__getattr__ = _explained(__name__)
