"""All pages, in the order of the navigation."""

from megascale_jax.views.dashboard.cube_page import CUBE
from megascale_jax.views.dashboard.goodput import GOODPUT
from megascale_jax.views.dashboard.heat_page import HEAT_MAP
from megascale_jax.views.dashboard.incidents import INCIDENTS
from megascale_jax.views.dashboard.nodes import NODES
from megascale_jax.views.dashboard.overview import OVERVIEW
from megascale_jax.views.dashboard.page import Page
from megascale_jax.views.dashboard.timeline import TIMELINE

PAGES: tuple[Page, ...] = (OVERVIEW, TIMELINE, HEAT_MAP, CUBE, INCIDENTS, GOODPUT, NODES)
