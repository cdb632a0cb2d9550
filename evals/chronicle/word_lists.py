"""List the words of the chronicle: rocks, plants, instruments and people of a survey, written for this project.

The invariant: no content word occurs in `evals.tasks.task_words`, in a task's wording or in the prose that the
reference model was trained with, and none has a digit or a hyphen. No key of a needle occurs here.
"""

# ruff: noqa: SIM905

SURNAMES = """
Adeyemi Ahlquist Bergstrom Bjerknes Castellanos Chowdhury Cvetkovic Demidov Dragomir Echeverria Eriksen Fujimoto
Grzybowski Gudmundsson Haldorsen Horvath Ivanescu Iyengar Jankauskas Jovanovic Karlsson Kavafian Lehtinen Lindqvist
Mbeya Moravec Nakamura Novotny Okonkwo Oyelaran Pereira Petrosyan Quiroga Rasmussen Rostami Sivertsen Szymanski
Takahashi Ulvestad Vasquez Vuksan Wojcik Xenakis Yilmaz Zelenka
""".split()

OFFICES = """
botanist hydrographer cartographer draughtsman quartermaster interpreter muleteer assayer geologist meteorologist
taxidermist lithographer archivist navigator bosun stoker purser sapper ornithologist apothecary mineralogist
glaciologist chronicler adjutant paymaster engineer machinist telegraphist assistant custodian
""".split()

TOPONYM_BEGINS = """
Skar Tolm Vesh Ostr Kel Brann Hjal Murr Dov Yarg Thessa Ulm Prav Ket Lun Aster Grind Sorr Halv Nis Quen Bel Zar Ivel
""".split()
TOPONYM_ENDS = """
vik holm mouth gard avits eskar undra oya fell enka stad ivik omar una esk addan ora itz umbra nes elva orsk anda
""".split()

MINERALS = """
basalt gneiss schist dolomite feldspar gypsum shale limestone pumice obsidian slate granite sandstone travertine kaolin
marl chert mica hornblende serpentine galena pyrite magnetite cinnabar bauxite graphite peat loam silt gravel clay
alabaster malachite haematite soapstone rhyolite tuff andesite diorite gabbro olivine quartzite saltpetre borax alum
""".split()

PLANTS = """
saxifrage yarrow gentian sedge juniper larch alder hornbeam lichen bracken sphagnum tamarisk lupin campion sorrel
crowberry cloudberry cottongrass horsetail liverwort plantain burdock comfrey valerian tansy mugwort fennel sainfoin
vetch bilberry butterwort sundew cinquefoil edelweiss rhododendron spleenwort stonecrop toadflax willowherb wintergreen
woodruff eyebright harebell meadowsweet
""".split()

INSTRUMENTS = """
theodolite barometer sextant chronometer hygrometer aneroid clinometer pantograph anemometer thermometer hydrometer
goniometer planimeter dynamometer seismograph galvanometer microscope spectroscope manometer pyrometer altimeter
octant heliograph
""".split()

TOOLS = """
crowbar auger chisel pickaxe mattock winch pulley grapnel dredge sieve funnel crucible retort bellows spirit clamp
gimlet pestle mortar trestle tarpaulin sledge hod ingot plumbline
""".split()

LANDFORMS = """
moraine escarpment estuary isthmus plateau gulch fjord crevasse caldera lagoon delta sandbar peninsula headland
watershed tributary glacier outcrop terrace fissure geyser scree promontory cirque alluvium talus drumlin
foreland inlet shoal rapids confluence
""".split()

SPECIMENS = """
ammonite trilobite brachiopod crinoid belemnite nautilus sponge anemone barnacle limpet whelk mussel starfish urchin
moth cicada newt salamander grebe petrel cormorant plover curlew ptarmigan dipper bunting marmot lemming stoat
vole chamois ibex lynx wolverine porpoise narwhal
""".split()

RECORDS = """
logbook gazetteer itinerary manifest catalogue inventory memorandum prospectus diagram transcript docket register
appendix supplement dossier bulletin herbarium
""".split()

LENGTHS = """
fathoms furlongs leagues paces cubits metres kilometres versts
""".split()

WEIGHTS = """
ounces grains drams litres bushels pints quintals scruples
""".split()

MANNERS = """
accurately approximately conspicuously diagonally exclusively gradually intermittently laboriously methodically
nominally obliquely painstakingly precariously promptly provisionally repeatedly rigorously scrupulously seemingly
sparsely systematically tentatively unexpectedly uniformly vertically visibly
""".split()

QUALITIES = """
granular sinuous porous tawny luminous glacial striated brackish lukewarm spongy friable serrated crystalline volcanic
metallic fibrous translucent opaque arid fertile navigable impassable submerged eroded tidal concave convex conical
cylindrical hexagonal asymmetric tufted aromatic resinous perennial evergreen nocturnal migratory gregarious venomous
fossilised abundant negligible inaccurate reliable obsolete tarnished waterlogged sulphurous phosphorescent pockmarked
lacquered corroded calcareous acidic saline temperate subterranean intermittent preliminary exhaustive
""".split()

HANDLED = """
surveyed measured triangulated catalogued dredged excavated calibrated labelled pressed dissected sketched engraved
photographed annotated weighed levelled plotted traversed quarried distilled filtered magnified estimated verified
transcribed indexed preserved crated inspected dismantled assembled lubricated reinforced evacuated ballasted
fumigated inoculated
""".split()

CAUSED = """
obscured undermined diverted saturated contaminated displaced overlaid bisected isolated sheltered nourished corroded
flooded fractured compressed magnetised bleached stained insulated obstructed
""".split()

HELD_THAT = """
reported maintained conjectured testified concluded objected conceded estimated calculated hypothesised certified
emphasised reiterated postulated inferred
""".split()
