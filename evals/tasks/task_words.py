"""List the words of tasks and of the training's prose, written for this project.

No list has a word twice. `KEY_WORDS` are lowercase letters only, so a key such as `amber-lantern` needs no escaping and
never occurs in a generated sentence (those have no hyphens).
"""

# ruff: noqa: SIM905

ADJECTIVES = """
amber ancient ashen autumnal awkward bare bitter bleak blue bold brass brief bright brittle broad broken bronze brown
calm careful cautious chalky cheap clean clear clever cloudy coarse cold copper coral crimson crooked cruel curious
damp dark deep delicate dense dim distant dry dusty early earnest eastern easy elder empty faded faint fair faithful
familiar fearful fierce fine firm flat foolish foreign fragile frosty gentle gilded glad gloomy golden grand grave gray
green grim handsome hard harsh hasty hazel heavy hollow honest humble hungry icy idle iron ivory jagged
jolly keen kind large late lazy lean level light little lofty lonely long loose low loyal marble meagre mellow merry
mild misty modest mossy muddy narrow neat new noble noisy northern odd old olive pale patient pearl plain pleasant
polished poor proud purple quaint quick quiet ragged rare rash raw ready red restless rich ripe rough round royal ruddy
rusty sacred sallow salty sandy scarlet secret sharp short shy silent silver simple slender slow small smooth snowy
sober soft solemn solid sour southern spare stale steady steep stern stiff still stormy stout strange strict strong
sturdy sudden sullen sunny sweet swift tall tame tender thick thin tidy timid tired tough troubled uneasy vast violet
warm weary western wet white wicked wide wild windy wise wooden yellow young
""".split()

OBJECTS = """
almanac anchor anvil apple apron arrow axe bag ballad banner barrel basin basket bell bench blanket book boot bottle
bowl box bread bridle broom brush bucket button cage candle cane cap card carpet cart chain chair chart chest clock
cloak coat coin comb compass cord cradle crate crown cup cupboard curtain cushion dagger desk diary dish drum envelope
fan feather fiddle flag flask flute fork frame garment glass globe glove grindstone hammer handkerchief harp hat
hatchet helmet hinge hook horn hourglass inkwell jar jewel jug kettle key knife ladder lamp lantern ledger lens letter
lock loom lute mallet map mask mast medal mirror mitten necklace needle net newspaper notebook oar orchid padlock
painting pan parcel parchment pebble pen pencil pendant pillow pipe pistol pitcher plate plough pocket portrait pot
purse quill rake razor ribbon ring robe rope rudder ruler sack saddle sail satchel saucer saw scarf sceptre scissors
scroll shawl shield shirt shoe shovel sickle sleeve spade spear spindle spoon spur staff stamp stocking stool stove
string sword table tablet tapestry teapot telescope thimble thread ticket torch tray trowel trumpet trunk umbrella
urn vase veil velvet vessel violin wagon wallet watch wax wheel whip whistle wreath
""".split()

PLACES = """
abbey alley arch attic balcony barn bay beach bridge brook cabin canal castle cave cellar chapel churchyard cliff
cloister coast corridor cottage courtyard cove creek crossroads dairy dell ditch dock doorway farm ferry field ford
forest forge fountain garden garret gate glade glen granary grove hall harbor heath hedge hill hilltop hollow inn
island kitchen lake lane library lighthouse market marsh meadow mill millpond mine monastery moor mountain orchard
palace parlor passage pasture path pavilion pier plain pond quarry quay ravine ridge river road ruin schoolhouse shed
shop shore shrine slope square stable stairway station stream street study swamp tavern temple theater tower town
trail tunnel valley village vineyard wall warehouse waterfall wharf windmill wood workshop yard
""".split()

ROLES = """
actor apprentice archer baker banker barber beggar blacksmith boatman bookseller butcher captain carpenter carter
clerk cobbler constable cook cooper countess coachman cousin dancer doctor doorkeeper driver duke farmer ferryman
fiddler fisherman gardener general girl glazier goldsmith governess grandfather grocer guard guest guide harvester
herald hermit hunter innkeeper judge juggler king knight landlady laborer lawyer lodger magistrate maid mason
mayor merchant messenger midwife miller miner minister monk neighbor nephew nun nurse officer orphan painter pedlar
peasant philosopher pilgrim pilot poet porter postman potter preacher priest printer prisoner queen rider sailor
schoolmaster scholar sculptor secretary sergeant servant shepherd shopkeeper singer soldier squire steward stranger
student surgeon surveyor tailor tanner teacher thatcher thief tinker traveler tutor uncle usher watchman weaver
widow witness woodcutter
""".split()

ANIMALS = """
badger bat bear bee beetle blackbird boar bull butterfly calf cat crow cuckoo deer dog donkey dove duck eagle eel
falcon ferret fox frog goat goose grasshopper gull hare hawk hedgehog hen heron horse hound kitten lamb lark lizard
magpie mare mole mouse mule nightingale otter owl ox partridge pheasant pigeon pony puppy rabbit rat raven robin
rook rooster salmon seal sheep sparrow spider squirrel stag stork swallow swan thrush toad trout turtle weasel wolf
woodpecker wren
""".split()

ABSTRACTIONS = """
advice affection alarm ambition anger anxiety bargain beauty belief blame bravery caution chance change charm comfort
complaint confidence confusion conscience courage courtesy curiosity danger debt defeat delay delight despair
difficulty disgrace doubt dread duty envy error escape excuse faith fame fate fatigue favor fear folly fortune freedom
friendship generosity gossip gratitude greed grief guilt habit happiness haste honor hope humor hunger idleness
illness impatience injury innocence insult jealousy journey joy judgment justice kindness labor laughter leisure
liberty loneliness loss loyalty luck malice memory mercy mischief misery mistake mystery obedience opinion patience
peace penalty pity pleasure poverty praise pride promise prudence punishment purpose quarrel reason regret relief
remorse reputation rest revenge reward rumor sadness scandal scorn secrecy shame silence sorrow strength success
superstition suspicion sympathy temper temptation trouble trust truth vanity victory virtue wealth weariness wisdom
wonder worry zeal
""".split()

FIRST_NAMES = """
Abigail Adrian Agnes Albert Alice Amos Andrew Anna Arthur Barbara Basil Beatrice Benjamin Bertha Bridget Caleb Cecil
Charlotte Clara Clement Cora Daniel Delia Dorothy Edgar Edith Edmund Edward Eleanor Elias Eliza Emily Ernest Esther
Eugene Felix Flora Frances Francis Frederick George Gerald Gertrude Gilbert Grace Hannah Harold Harriet Helen Henry
Herbert Horace Hugh Ida Isaac Isabel Jacob James Jane Jasper Joan Joel Jonas Joseph Judith Julia Julian Katherine
Laura Lawrence Leonard Lewis Lionel Louisa Lucy Luke Lydia Mabel Margaret Marian Mark Martha Martin Matilda Maurice
Miriam Nathan Nora Oliver Oscar Owen Patrick Paul Peter Philip Phoebe Rachel Ralph Rebecca Richard Robert Roger Rosa
Rupert Ruth Samuel Sarah Silas Simon Sophia Stephen Susan Sylvia Theodore Thomas Timothy Tobias Ursula Victor Vincent
Viola Walter Wilfred William Winifred
""".split()

LAST_NAMES = """
Abbott Ainsworth Aldridge Appleby Arkwright Ashford Atwood Barlow Bartlett Beckett Bellamy Benson Blackwood Bradshaw
Bramley Brewster Buckley Burnett Calloway Carrington Chadwick Chandler Clayton Colby Compton Crawford Crosby Dalton
Davenport Dawson Denham Dixon Drayton Dunbar Easton Eldridge Ellery Fairfax Farrell Fenwick Fielding Fletcher Forster
Gaskin Gibson Goodwin Grantham Greaves Hadley Halloway Hargrove Harlow Hartley Hathaway Hawkins Hayward Hobson
Holloway Hutchins Ingram Jarvis Jennings Kendall Kingsley Lambert Langley Latimer Lockwood Lowell Marlow Marsden
Mayhew Mercer Merrick Middleton Norwood Oakley Osborne Paxton Pembroke Penrose Pickering Prescott Quincy Radcliffe
Ramsey Redfern Ridley Rowland Rutledge Sedgwick Selby Shelton Stafford Stanhope Sutton Talbot Thackeray Thornton
Tilney Trent Underhill Vickers Wakefield Walcott Warwick Webster Weston Whitaker Winslow Woodward Wyndham Yardley
""".split()

CITIES = """
Amsterdam Athens Barcelona Belgrade Berlin Bergen Boston Bristol Brussels Budapest Cairo Calcutta Chicago Copenhagen
Cordoba Cracow Dresden Dublin Edinburgh Florence Geneva Genoa Glasgow Granada Hamburg Helsinki Kyoto Leipzig Lima
Lisbon Liverpool London Lyons Madrid Marseilles Milan Montreal Moscow Munich Naples Odessa Oslo Oxford Palermo Paris
Philadelphia Porto Prague Quebec Riga Rome Rotterdam Salzburg Seville Sofia Stockholm Toledo Toulouse Trieste Turin
Utrecht Valencia Venice Verona Vienna Warsaw York Zurich
""".split()

JOBS = """
baker banker barber blacksmith bookseller butcher carpenter clerk cobbler cook dentist doctor farmer fisherman gardener
grocer hunter jeweler judge lawyer librarian mason merchant miller miner musician nurse painter pilot plumber poet
porter potter printer sailor sculptor shepherd soldier surgeon tailor teacher translator watchmaker weaver
""".split()

KEY_WORDS = sorted({word for word in ADJECTIVES + OBJECTS + PLACES + ANIMALS + ABSTRACTIONS if word.isalpha()})
