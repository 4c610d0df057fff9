"""Role swaps in English: trees that are swapped, and trees that are skipped, with the reason.

A line of a table is a tree, or the words of a subject ``|`` a verb phrase. NUN is *the nun*. Lines that are further in
continue the line before.
"""

import dataclasses
import re

import pytest

from pelocality.corpora import read_frames
from pelocality.probes import probe_info, semantic_role_swap
from tests.data import EXAMPLES
from tests.test_probes import sentence

# the reason why they are skipped: trees, whoever made them
SKIPPED = {
    "the verb is a copula": """
        NUN | (VBD became) (NP (DT a) (NN judge))
        (DT The) (NNS nuns) | (VBD were) (NP (DT a) (NN choir))
        (DT The) (NN sum) | (VBZ marks) (NP (DT a) (NN decline))
        NUN | (VBD stayed) (NP (DT a) (NN judge))
        NUN | (VBZ represents) (NP (DT the) (NN judge))
        NUN | (VBD felt) (NP (DT a) (NN fool))
        (DT The) (NN cook) | (VBD proved) (NP (DT a) (JJ good) (NN judge))
        NUN | (VBD acted) (NP (DT the) (NN fool))
        (DT The) (NN soup) | (VBZ tastes) (NP (NN heaven))
    """,
    "the object repeats the verb": """
        (DT The) (NN choir) | (VBD sang) (NP (DT a) (JJ sad) (NN song))
        NUN | (VBD dreamed) (NP (DT the) (NN dream))
        (PRP I) | (VBD told) (NP (DT a) (NN tale))
        NUN | (VBD smiled) (NP (DT a) (JJ sad) (NN smile))
        NUN | (VBD breathed) (NP (DT a) (JJ deep) (NN breath))
        NUN | (VBD believed) (NP (DT a) (NN belief))
        NUN | (VBD saw) (NP (DT a) (NN sight))
    """,
    "the verb may be symmetric": """
        NUN | (VBD met) (NP (DT a) (NN judge))
        NUN | (VBD married) (NP (DT a) (NN judge))
        (PRP He) | (VBD met) (NP (NP (DT the) (NN man)) (SBAR (S (NP (DT the) (NN nun)) (VP (VBD saw)))))
        NUN | (VBD hugged) (NP (DT a) (NN judge))
        NUN | (VBZ faces) (NP (DT a) (NN judge))
        (DT The) (NN court) | (VBD cleared) (NP (DT the) (NN sale))
        (DT The) (NN trade) | (VBZ enters) (NP (DT a) (NN slump))
        (NNP Germany) | (VBD played) (NP (NNP Brazil))
        (DT The) (NNPS Bears) | (VBD played) (NP (DT the) (NNP Red) (NNP Sox))
        (NNP Ali) | (VBD boxed) (NP (NNP Frazier))
        (DT The) (NN road) | (VBZ crosses) (NP (DT the) (NN river))
        (CD Five) (NNS nuns) | (VBP comprise) (NP (DT the) (NNS choirs))
        (CD Five) (NNS nuns) | (VBP compose) (NP (DT the) (NNS choirs))
        NUN | (VBZ contradicts) (NP (DT a) (NN judge))
        NUN | (VBZ is) (VP (VBG seeing) (NP (DT the) (NN judge)))
    """,
    "a reflexive or reciprocal in the sentence": """
        NUN | (VBD hid) (NP (PRP herself))
        (DT The) (NNS nuns) | (VBD hid) (NP (DT each) (JJ other))
    """,
    "a pronoun may refer to an argument": """
        NUN | (VBD lost) (NP (PRP$ her) (NN hat))
        (S (NP NUN) (VP (VBD sent) (NP (NNP Ada)) (PP (IN to) (NP (PRP$ her) (NN judge)))))
        (PRP I) | (VBD asked) (NP (PRP him)) (S (VP (TO to) (VP (VB help) (NP (PRP me)))))
    """,
    "a light verb with a noun": """
        NUN | (VBD paid) (NP (NN attention))
        (DT The) (NN girl) | (VBD gave) (NP (DT a) (NN speech))
        NUN | (VBD shook) (NP (NNS hands))
        NUN | (VBD did) (NP (DT the) (NN job))
        (S (NP (DT A) (NN nun)) (VP (VBD gave) (NP (NNS boards) (NN help))))
        NUN | (VBD laid) (NP (NN siege)) (PP (TO to) (NP (DT the) (NN town)))
        NUN | (VBD turned) (NP (NN traitor))
        NUN | (VBD bore) (NP (NN witness))
    """,
    "an argument is a measure": """
        NUN | (VBD walked) (NP (DT a) (NN mile))
        (NNP Ada) | (VBD advanced) (NP (CD two) (NNS cents))
        NUN | (VBD left) (NP (NNP March) (CD 3))
        NUN | (VBD was) (VP (VBN hired) (PP (IN by) (NP (DT the) (NNS 1870s))))
        NUN | (VBD changed) (NP (PRP$ my) (NN hat) (JJ last) (NN week))
        (NNS Nuns) | (VBP change) (NP (NN everyday))
        NUN | (VBD walked) (NP (CD three) (NNS kilometres))
        NUN | (VBZ watches) (NP (NP (DT a) (NN ton)) (PP (IN of) (NP (NN series))))
        (PRP I) | (VBD changed) (NP (PRP$ my) (NN hat) (JJ last) (NN term))
        NUN | (VBD rested) (NP (DT a) (NN moment))
        NUN | (VBD rested) (NP (DT an) (NN instant))
        NUN | (VBD rested) (NP (DT a) (NN spell))
        NUN | (VBD rested) (NP (DT a) (NN fortnight))
    """,
    "the arguments do not stand beside one finite verb": """
        NUN | (VBD never) (VBD saw) (NP (DT any) (NN judge))
        (SBAR (IN whether) (S (NP (PRP you)) (VP (VB need) (NP (DT the) (NN hat)))))
        NUN | (MD will) (VP (VB be) (VP (VBN sent) (NP-TMP (NN today)) (VP (VBG wearing) (NP (DT a) (NN hat)))))
        NUN | (VBN bitten) (NP (DT a) (NN judge))
        (S (NP NUN) (ADVP (RB alone)) (VP (VBD saw) (NP (DT the) (NN hat))) (. .))
        (DT The) (NNS nuns) | (ADVP (RB jointly)) (VBD saw) (NP (NNP Ada))
        (S (S (NP (NNP Ada)) (VP (VBD fed) (NP (DT the) (NNS nuns)))) (PP (VBG including) (NP (NNP Cleo))) (. .))
        (PRP I) | (VBD had) (S (NP (NN someone)) (VP (VB help) (NP (PRP me))))
        (S (VP (VB Let) (S (NP (DT the) (NN nun)) (VP (VB fool) (NP (PRP you))))) (. .))
        (NP (NP (DT A) (NN nun)) (VP (VBG holding) (NP (DT a) (NN microphone) (NN singing))) (. .))
        (NP (NP (DT A) (NN nun)) (VP (VBG buying) (NP (NNS drinks) (CC and) (VBG smoking) (NNS pipes))) (. .))
        (NP (NP (DT A) (NN nun)) (VP (VBG wearing) (NP (DT a) (NN hat)) (PP (IN after) (S (VP (VBG racing))))) (. .))
        (NP (NP (DT A) (NN nun)) (VP (VBG running) (NP (DT a) (NN marathon) (NNS talks))) (. .))
        (NP (NP (NP (DT A) (NN view)) (PP (IN of) (NP (DT a) (NN nun)))) (VP (VBG buying) (NP (DT a) (NN drink))) (. .))
        (NP (NP (NP (DT A) (NN nun)) (PP (IN in) (NP (NN red))) (CC and) (NP (DT a) (NN boy))) (VP (VBG riding) (NP
            (DT a) (NN bike))) (. .))
    """,
    "an argument is not a plain noun phrase": """
        (WP Who) | (VBD saw) (NP (DT the) (NN judge))
        NUN | (VBD saw) (NP (DT a) (NN hat) (: ;) (DT a) (NN cap))
        (NNP Ada) (NNP Jr.) | (VBD saw) (NP (DT the) (NN nun))
        (NNP Ada) | (VBD expected) (NP (PRP it))
        (NNP Ada) | (VBD ate) (NP (NP (DT a) (NN meal)) (, ,) (SBAR (WDT which) (VP (VBD was) (NP (PRP me)))))
        NUN | (VBD saw) (NP (PRP him) (CC and) (PRP me))
        (S (NP (DT A) (NN nun)) (VP (VBD sewed) (NP (NP (DT a) (NN hat)) (S (VP (TO to) (VP (VB wear)))))))
        (S (SBARQ (WRB How) (SQ (MD can) (NP (PRP we)) (VP (VB license) (NP (NP (NNS operators)) (SBAR (IN if) (S (NP
            (PRP we)) (VP (VBP leave)))))))) (. ?))
        (DT The) (`` ``) (NN nun) ('' '') (NN film) | (VBD saw) (NP (NNP Ada))
        (PRP It) | (VBD rained) (NP (NNS cats))
        (EX There) | (VBD left) (NP (DT a) (NN nun))
        (S (NP (PRP It)) (VP (VBD scared) (NP (DT the) (NN nun)) (S (VP (TO to) (VP (VB run))))))
        NUN | (VBD saw) (NP (NP (DT the) (NN hat)) (SBAR (S (NP (NNP Ada)) (VP (VBD wore))))) (PP (IN on) (NP
            (NNP Sunday)))
        NUN | (VBD fed) (NP (JJR fatter) (NNS geese)) (PP (IN than) (NP (NNP Ada)))
        NUN | (VBD fed) (NP (NN goose) (RB just) (DT the) (NN liver))
        (NNP Ada) | (VBD saw) (NP (DT a) (NN nun) (: -) (NN cook))
        (PRP I) | (VBD saw) (NP (NP (DT a) (JJ dear)) (SBAR (S (NP (PRP I)) (VP (VBP trust)))))
        NUN | (VBD saw) (NP (DT the) (NNP U.K))
        (DT The) (NNP U.S.) | (VBD saw) (NP (DT the) (NN nun))
        NUN | (VBD saw) (NP (FW Felis) (, ,) (DT a) (NN cat))
        (S (NP (DT The) (NNS hats)) (SBAR (IN that) (S (NP NUN) (VP (VBD knew) (NP (NP (DT the) (NNS owners)) (PP
            (IN of)))) (. .))))
        NUN | (VBD knew) (NP (NP (DT the) (NN joy)) (PP (IN of) (S (VP (VBG eating)))))
        (DT The) (NNS nuns) (DT each) | (VBD saw) (NP (NNP Ada))
        NUN | (VBD saw) (NP (NP (DT a) (NN cook)) (VP (VBG washing) (NP (NNS hats))))
        NUN | (VBD answered) (NP (NP (DT the) (NN phone)) (PP (IN for) (NP (DT the) (NN cook))))
        (PRP I) | (VBP have) (NP (NP (DT a) (NN hat)) (SBAR (S (NP (PRP I)) (VP (VBD bought) (PP (IN in) (NP
            (NNP Bonn)))))))
        NUN | (VBD was) (VP (VBN seen) (PP (IN by) (NP (NP (NNS cooks)) (PP (IN in) (NP (NNP Bonn))))))
        (PRP I) | (VBD saw) (NP (CD three) (NNS nuns) (RB there))
        NUN | (VBD set) (NP (DT a) (NN record) ($ $) (CD 70))
        NUN | (VBD saw) (NP (NN football) (NNS indoors))
        NUN | (VBD walked) (NP (NNS backwards))
        NUN | (VBD walked) (NP (NN skyward))
        NUN | (VBD saw) (NP (CC and) (DT the) (NN hat))
        NUN | (VBD saw) (NP (NP (DT the) (NN film)) (NP (`` ') (NNP Cleo) ('' ')))
        NUN | (VBD saw) (NP (DT the) (UH uh) (NN hat))
    """,
    "the text would not change": """
        NUN | (VBD saw) (NP (DT the) (NN nun))
    """,
    "a role has no argument, or several": """
        (S (NP (NNP Ada) (, ,) (DT the) (NN nun)) (, ,) (VP (VBD saw) (NP (DT a) (NN hat))) (. .))
        (S (NP (DT The) (NNS nuns)) (ADVP (DT all)) (VP (VBD saw) (NP (DT the) (NN hat))))
        (PRP He) | (VBD confirmed) (SBAR (IN that) (S (NP (DT the) (NNS values)) (VP (VBP are) (ADJP (JJ correct)))))
        (PRP They) | (VBD ate) (ADVP (RB lightly)) (NP (VBN salted) (NNS nuts))
        NUN | (VBD sent) (PP (IN on) (NP (NNP Sunday))) (NP (DT a) (JJ new) (NN hat))
        (NNP Ada) (, ,) (DT a) (NN cook) (WP who) (VBZ bakes) (CC and) (VBZ sings) | (VBD saw) (NP (DT the) (NN judge))
        (S (NP NUN) (, ,) (ADVP (RB too)) (, ,) (VP (VBD saw) (NP (NNS hats))) (. .))
        NUN (RB alone) | (VBD saw) (NP (NNP Ada))
        NUN | (VBD was) (VP (VBN seen) (PP (IN in) (NP (NNP Bonn))) (PP (IN by) (NP (DT a) (NN cook))))
        NUN | (VBD ran) (NP (VBG playing) (NN chess))
        (S (NP (NNP Ada)) (, ,) (VP (VBD saw) (NP (DT the) (NN judge))))
    """,
    "an argument has a quantifier or comparison that depends on other words": """
        (CD One) (NN nun) | (VBD saw) (NP (DT another) (NN nun))
        NUN | (VBD bought) (NP (JJ enough) (NNS geese)) (S (VP (TO to) (VP (VB feed) (NP (PRP us)))))
        NUN | (VBD did) (RB n't) (VP (VB see) (NP (JJ much) (NN harm)))
        NUN | (VBD refused) (NP (DT any) (NN hat))
        (DT No) (NN nun) | (ADVP (RB ever)) (VBD wore) (NP (DT a) (NN hat))
        NUN | (VBZ poses) (NP (DT no) (NN harm))
        NUN | (MD wo) (RB nt) (VP (VB eat) (NP (NN anything)))
        (NN Thou) (NN hast) | (VBD told) (NP (PRP me))
        (DT A) (NN nun) | (VBD saw) (NP (DT another) (NN nun))
    """,
    "words after the last argument may belong to it": """
        (S (NP (DT A) (NN nun)) (VP (VBD saw) (NP (DT a) (NN judge)) (SBAR (WDT that) (S (VP (VBD left))))))
        (PRP I) | (MD shall) (VP (VB send) (NP (PRP you)) (NP (DT a) (NN copy)))
        (S (NP (DT A) (NN nun)) (VP (VBZ makes) (NP (PRP$ her) (NN guest)) (NP (DT a) (NN meal))))
        NUN | (VBD washed) (NP (DT the) (NNS stairs)) (S (VP (VBG leading) (ADVP (RB down))))
        NUN | (VBD bought) (NP (DT the) (NN ladder)) (S (VP (TO to) (VP (VB reach) (NP (NNS nests)))))
        NUN | (VBD taught) (NP (DT a) (NN judge)) (, ,) (ADJP (JJ fond) (PP (IN of) (NP (NNS cats))))
        NUN | (VBD fed) (NP (CD ten) (NNS cats)) (ADVP (DT a) (NN day))
        NUN | (VBD saw) (NP (DT the) (NN train)) (PP (IN from) (NP (NNP Bonn)))
        NUN | (VBD fed) (NP (JJ white) (NNS geese)) (ADJP (CC but) (RB only) (JJ hungry))
        NUN | (VBD issued) (NP (NNS waivers)) (PP (IN under) (NP (DT the) (NN law)))
        NUN | (VBD got) (NP (DT a) (NN break)) (`` ``) (PP (IN in) (NP (DT a) (JJ new) (NN hat))) ('' '')
        NUN | (VBD issued) (NP (NNS waivers)) (-LRB- -LRB-) (PP (IN under) (NP (NN law))) (-RRB- -RRB-)
        NUN | (VBD sold) (NP (DT the) (NN house)) (S (NP (PRP she)) (VP (VBD rented)))
        NUN | (VBD saw) (NP (DT the) (NN hat)) (, ,) (PP (IN except) (NP (DT the) (NN rim)))
        NUN | (VBD piled) (NP (NN hat)) (PP (IN upon) (NP (NN hat)))
        NUN | (VBD visited) (NP (NNP Halle)) (PP (IN in) (NP (NNP Saxony)))
        (S (S (NP (NNP Ada)) (VP (VBD left) (NP (DT the) (NN house)))) (S (NP (PRP she)) (VP (VBD rented))) (. .))
        (S (S (NP (NNP Ada)) (VP (VBD found) (NP (DT the) (NN truth)))) (, ,) (NP (JJ big) (NNS hats)) (. .))
        (PRP He) | (VBD treated) (NP (PRP them)) (PP (IN like) (NP (NNS sons)))
        (PRP They) | (VBD hired) (NP (NNP Ada)) (PP (IN as) (NP (DT a) (NN cook)))
        (PRP They) | (VBD called) (NP (PRP him)) (ADJP (DT a) (NN fool))
        NUN | (VBD saw) (NP (DT the) (NN hat)) (ADVP (RB whatsoever))
        NUN | (VBD knew) (NP (NN everything)) (ADVP (RB there))
        NUN | (VBD saw) (NP (DT the) (NN hat)) (ADVP (RB nearby))
        NUN | (VBD knew) (NP (PRP everything)) (PP (IN in) (NP (NNP Bonn)))
        (DT The) (NNS nuns) | (VBD ate) (NP (DT the) (NNS apples)) (ADVP (RB together))
        (PRP I) | (VBD chose) (NP (NNP Ada)) (, ,) (SBAR (IN as) (SINV (VBD did) (NP (NP (DT the) (NN nun)) (SBAR
            (WP who) (S (VP (VBD left)))))))
        (PRP She) | (VBD wanted) (S (NP (DT a) (NN nun)) (VP (TO to) (VP (VB help) (NP (PRP her)))))
        NUN | (VBD saw) (NP (NNP Ada)) (SBAR (IN while) (S (VP (VBG eating) (NP (NN soup)))))
        (S (NP (DT A) (NN nun)) (VP (VBD saw) (NP (DT a) (NN girl)) (SBAR (IN as) (S (NP (NNP Ada)) (VP (VBD left))))))
    """,
    "whether a word keeps its capital is unknown": """
        (JJ Well-known) (NNS nuns) | (VBD saw) (NP (NNP Ada))
        (S (NP (DT The) (NN man)) (VP (VBD dropped) (NP (NNP iPhone) (CD 5))))
        (S (NP (NNP iPhone) (CD 5)) (VP (VBD struck) (NP (DT the) (NN man))))
        (S (NP (DT THE) (NN dog)) (VP (VBD bit) (NP (DT a) (NN man))))
        (S (`` ``) (S (NP (NNP Ada)) (VP (VBD ran))) (, ,) ('' '') (CC and) (`` ``) (S (NP (JJ Old) (NNS nuns)) (VP
            (VBD saw) (NP (PRP us)))) ('' ''))
        (S (NP (NN COPPER)) (: :) (S (NP (JJ Old) (NNS nuns)) (VP (VBD saw) (NP (PRP us)))))
        (PRP She) | (VBD said) (, ,) (`` ``) (S (NP (PRP I)) (VP (VBD saw) (NP (DT a) (NN nun))))
        NUN | (VBD slept) (S (NP (PRP We)) (VP (VBD saw) (NP (DT the) (NN hat))))
        (JJ Greek) (NNS troops) | (VBD saw) (NP (DT the) (NNS nuns))
        (JJ Soviet) (NNS troops) | (VBD saw) (NP (DT the) (NNS nuns))
        (JJ Dutch) (NN beer) | (VBD saw) (NP (DT the) (NNS nuns))
        (JJ Welsh) (NNS hats) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Muslims) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Arabs) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Jews) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Germans) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Iraqis) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Frenchmen) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Chinese) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNS Gypsies) | (VBD saw) (NP (DT the) (NNS nuns))
        (JJ Swiss) (NN cheese) | (VBD saw) (NP (DT the) (NNS nuns))
        (JJ Hindu) (NNS nuns) | (VBD saw) (NP (DT the) (NNS nuns))
        (JJ Protestant) (NNS nuns) | (VBD saw) (NP (DT the) (NNS nuns))
        (NNP Freedom) | (VBD scared) (NP (NNP Ada))
        (NNP Love) | (VBD scared) (NP (NNP Ada))
    """,
    "the verb takes a measure, a place or quoted words": """
        NUN | (VBD said) (NP (DT a) (NN word))
        (NN Revenue) | (VBD declined) (NP (CD 8) (NN %))
        NUN | (VBZ is) (VP (VBG thinking) (NP (CD four) (NNS hats)))
        NUN | (VBD fell) (NP (NN victim))
        NUN | (VBD died) (NP (DT a) (NN death))
        NUN | (VBD waited) (NP (DT an) (NN age))
    """,
    "an argument cuts a surface token": """
        (S (NP (NNP Ada)) (VP (VBZ 's) (VP (VBG hiding) (NP (DT a) (NN hat)))))
    """,
    "the arguments are not subject and object, or subject and agent, of one clause": """
        (S (NP (PRP I)) (VP (VBD picked) (PRT (RP up)) (NP (DT the) (NN hat))))
        (PRP We) | (VBD pulled) (PRT (RP off)) (NP (DT an) (NN operation))
        (S (NP (DT A) (NN nun)) (VP (VBD slid) (PRT (RP down)) (NP (DT a) (NN hill))))
    """,
    "the verb would not agree with its new subject": """
        (S (NP (DT A) (NN nun)) (VP (VBZ sees) (NP (DT the) (NNS hats))))
        (NNPS Physics) | (VBZ bores) (NP (DT the) (NNS students))
    """,
    "a symbol, or a word that is cut, stands in the sentence": """
        (NN Lane) (CD 15) | (VBZ indicates) (NP (NN PtenloxP/+))
        (DT The) (NNS mice) | (VBP average) (NP (CD 480±5) (NN mg))
        (DT The) (NN file) | (VBD saw) (NP (PRP them)) (SYM *)
        NUN | (VBD saw) (NP (AFX th-) (DT the) (NN hat))
        NUN | (VBD saw) (NP (NNP <unk>))
    """,
    "the phrase with by may tell a means": """
        (DT The) (NNS cells) | (VBD were) (VP (VBN lysed) (PP (IN by) (NP (NN sonication))))
        (DT The) (NNS cells) | (VBD were) (VP (VBN lysed) (PP (IN by) (NP (DT the) (NN method))))
        NUN | (VBD was) (VP (VBN moved) (PP (IN by) (NP (NN force))))
        NUN | (VBD was) (VP (VBN moved) (PP (IN by) (NP (JJ royal) (NN decree))))
    """,
    "words before the first argument may belong to it": """
        (S (NP NUN) (CC and) (NP (DT the) (NN judge)) (VP (VBD saw) (NP (NNP Ada))) (. .))
        (S (NP (PRP$ My) (NN friend)) (NP (DT the) (NN judge)) (VP (VBD saw) (NP (NNP Ada))) (. .))
        (S (NP (NN Nun)) (S (NP (NNS Hats)) (VP (VBD scared) (NP (PRP us)))))
        (S (NP NUN) (PP (IN in) (NP (NNP Bonn))) (VP (VBD saw) (NP (DT a) (NN judge))) (. .))
        (S (ADVP (RB Almost)) (NP (DT every) (NN nun)) (VP (VBD saw) (NP (DT a) (NN hat))))
        (S (CC Either) (NP (DT the) (NN nun) (CC or) (NNP Ada)) (VP (VBD saw) (NP (DT a) (NN hat))))
        (S (ADVP (RB Largely)) (NP (NNS nuns)) (VP (VBD saw) (NP (DT a) (NN hat))))
        (S (S (VP (VBG Sitting) (PRT (RP down)))) (, ,) (NP (DT the) (NN nun)) (VP (VBD saw) (NP (NNP Ada))) (. .))
        (S (NP (DT A) (NN nun)) (ADJP (JJ next) (PP (TO to) (NP (NNP Ada)))) (VP (VBD saw) (NP (DT a) (NN hat))) (. .))
        (S (PP (IN With) (NP (DT a) (NN hat))) (NP (DT a) (NN nun)) (VP (VBD saw) (NP (DT a) (NN girl))))
        (S (S (NP (PRP I)) (VP (VBD saw))) (S (NP (PRP I)) (VP (VBD saw) (NP (NNP Ada)))) (. .))
        (S (S (NP (PRP He)) (VP (VBD left))) (CC and) (S (S (VP (VBG sitting) (PRT (RP down)))) (, ,) (NP NUN) (VP (VBD
            saw) (NP (NNP Ada)))) (. .))
        (S (S (NP (PRP He)) (VP (VBD left))) (, ,) (CC and) (S (S (VP (VBN tired))) (, ,) (NP NUN) (VP (VBD saw) (NP
            (NNP Ada)))) (. .))
    """,
    "the sentence is a heading": """
        (S (NP (DT The) (NNP Dog)) (VP (VBD Bit) (NP (DT a) (NNP Man))))
    """,
    "another verb has the same subject": """
        (S (S (NP NUN) (VP (VBD saw) (NP (NNP Ada)))) (CC and) (VP (RB also) (VBP like) (NP (NNS hats))))
        (S (S (NP NUN) (VP (VBZ sees) (NP (NNS hats)))) (, ,) (SQ (VBZ does) (RB n't) (NP (PRP she))) (. ?))
        (S (S (NP NUN) (VP (VBZ is) (VP (VBG milking) (NP (NNP Ada))))) (, ,) (SQ (VBZ is) (NP (PRP she))) (. ?))
        (S (S (NP (NNP Ada)) (VP (VBD chose) (NP (PRP me)))) (, ,) (SQ (VBD did) (RB n’t) (NP (PRP she))) (. ?))
        NUN | (VBD saw) (NP (NNP Ada)) (, ,) (S (VP (VBG hoping) (S (VP (TO to) (VP (VB win))))))
        NUN | (VBD sent) (NP (NNP Ada)) (PP (TO to) (NP (NNP Bonn))) (, ,) (VBG laughing)
        NUN | (VBD sent) (NP (NNP Ada)) (PP (TO to) (NP (NNP Bonn))) (, ,) (ADVP (RB then)) (VBD left)
        NUN | (MD might) (VP (VB send) (NP (PRP me)) (PP (TO to) (NP (NNP Bonn))) (, ,) (CC or) (ADVP (IN at)
            (JJS least)) (VP (VB hide) (NP (DT the) (NN hat))))
        NUN | (VBZ has) (VP (VBN sent) (NP (NNP Ada)) (PP (TO to) (NP (NNP Bonn))) (CC and) (VP (VBN paid) (NP
            (NNS cooks))))
    """,
    "the subject may stand after the verb": """
        NUN | (VBZ has) (NP (DT a) (NN hat))
    """,
    "an auxiliary stands for the verb phrase": """
        (S (S (NP (PRP I)) (VP (VBD chose) (NP (NNP Ada)))) (CC and) (S (NP (PRP we)) (VP (VBD did))) (. .))
        (S (S (NP (PRP I)) (VP (VBD chose) (NP (NNP Ada)))) (CC and) (S (NP (PRP we)) (VP (VBP do) (RB too))))
        (S (S (NP (PRP I)) (VP (VBD chose) (NP (NNP Ada)))) (, ,) (CC but) (S (NP (PRP we)) (VP (MD could) (RB n’t)))
            (. .))
        (S (S (NP NUN) (VP (VBD saw) (NP (NNP Ada)))) (, ,) (CC but) (S (NP (PRP I)) (VP (MD can) (NP (PRP$ my)
            (NN cat)))) (. .))
    """,
    "the tense of the verb is unknown": """
        (PRP I) | (VBD put) (NP (DT the) (NN hat)) (ADVP (RB down))
    """,
    "the verb cannot be reinflected": """
        (PRP They) | (VBP knew) (NP (DT the) (NN nun))
    """,
    "the number of the new subject is in doubt": """
        NUN | (VBZ knows) (NP (NNP Swedish) (NNP Hills))
        NUN | (VBZ knows) (NP (JJ old) (NN insurgents))
    """,
}

# the reason why they are skipped if a parser made them: trees that are swapped in a treebank
SKIPPED_IF_PARSED = {
    "the arguments do not stand beside one finite verb": """
        (S (NP (NNP Ada)) (ADVP (RB only)) (VP (VBD saw) (NP (PRP me))) (. .))
    """,
    "an argument is not a plain noun phrase": """
        (PRP You) | (VBP leave) (NP (JJ young) (NN owl))
        (PRP They) | (VBP have) (VP (VBN eaten) (NP (JJ salted) (NNS nuts)))
        NUN | (VBD saw) (NP (DT a) (NN cat) (, ,) (DT a) (NN dog) (CC and) (DT an) (NN owl))
        (DT A) (NN nun) | (VBZ is) (VP (VBG helping) (NP (DT a) (JJ small) (NN child) (NN dig)))
        (DT A) (NN dog) | (VBD ate) (NP (NP (DT a) (NN hat)) (SBAR (WDT that) (S (VP (VBD lay) (PP (IN on) (NP
            (DT the) (NN grass)))))))
        (DT A) (NN nun) | (VBD robbed) (NP (NP (DT a) (NN cook)) (PP (IN of) (NP (NNS hats))))
        (S (NP (DT A) (NN nun)) (VP (VBD was) (VP (VBN bitten) (PP (IN by) (NP (DT a) (NN dog) (NN walking))))))
        (DT A) (NN nun) | (VBD drank) (NP (NN water))
        (DT A) (NN nun) | (VBD saw) (NP (NP (DT a) (NN cat)) (SBAR (WHNP (WDT that)) (S (VP (VBD sat)))))
    """,
    "words before the first argument may belong to it": """
        (S (PP (IN As) (NP (DT an) (NN officer))) (NP (PRP you)) (VP (VBD saw) (NP (NNP Ada))) (. .))
    """,
    "the subject may stand after the verb": """
        (DT No) (NN power) | (VBD had) (NP (PRP them))
    """,
    "the tense of the verb is unknown": """
        (CD Two) (NNS men) | (VBD carve) (NP (DT a) (NN ham))
    """,
    "words after the last argument may belong to it": """
        (S (NP (DT A) (NN nun)) (VP (VBD lifted) (NP (DT a) (NN girl)) (PP (IN onto) (NP (NN town))) (PP (IN to) (NP
            (DT a) (NN wall)))))
        (DT A) (NN nun) | (VBD gave) (NP (DT the) (NN hat)) (PP (TO to) (NP (NNP Ada)))
    """,
}

# trees of a treebank by what becomes of them
SWAPPED = {
    "Oracle sued Google over Java.": "(NNP Google) | (VBD sued) (NP (NNP Oracle)) (PP (IN over) (NP (NNP Java)))",
    "He took her home.": "(PRP She) | (VBD took) (NP (PRP him)) (ADVP (RB home))",
    "Ada brought us.": "(PRP We) | (VBD brought) (NP (NNP Ada))",
    "The kinase inhibits B1.": "(NNP B1) | (VBZ inhibits) (NP (DT the) (NN kinase))",
    "Two masked men were robbed by my neighbours.":
        "(PRP$ My) (NNS neighbours) | (VBD were) (VP (VBN robbed) (PP (IN by) (NP (CD two) (VBN masked) (NNS men))))",
    "A CAT HAS YOU.": "(PRP YOU) | (VBP HAVE) (NP (DT A) (NN CAT))",
    "HE BIT THE DOG.": "(DT THE) (NN DOG) | (VBD BIT) (NP (PRP HIM))",
    "A DOG ISN'T BITING ME.": "(PRP I) | (VBP AM) (RB N'T) (VP (VBG BITING) (NP (DT A) (NN DOG)))",
    "I BIT A DOG.": "(DT A) (NN DOG) | (VBD BIT) (NP (PRP ME))",
    "The man bit 5 dogs": "(S (NP (CD 5) (NNS dogs)) (VP (VBD bit) (NP (DT the) (NN man))))",
    "HE bit her": "(S (NP (PRP She)) (VP (VBD bit) (NP (PRP HIM))))",
    "The judge shook the nun.": "NUN | (VBD shook) (NP (DT the) (NN judge))",
    "The hat makes the nun.": "NUN | (VBZ makes) (NP (DT the) (NN hat))",
    "A judge visited Ada.": "(NNP Ada) | (VBD visited) (NP (DT a) (NN judge))",
    "The road signs saw the nun.": "NUN | (VBD saw) (NP (DT the) (NN road) (NNS signs))",
    "A train, a boat and a bus saw the nun.":
        "NUN | (VBD saw) (NP (DT a) (NN train) (, ,) (DT a) (NN boat) (CC and) (DT a) (NN bus))",
    "The cook was hired by the nun.": "NUN | (VBD was) (VP (VBN hired) (PP (IN by) (NP (DT the) (NN cook))))",
    "Few hats have him.": "(PRP He) | (VBZ has) (NP (JJ few) (NNS hats))",
    "The US left Ada.": "(NNP Ada) | (VBD left) (NP (DT the) (NNP US))",
    "I saw him today.": "(PRP He) | (VBD saw) (NP (PRP me)) (NP-TMP (NN today))",
    "I put him down.": "(PRP He) | (VBD put) (NP (PRP me)) (ADVP (RB down))",
    "The hat that lay on grass saw the nun.":
        "NUN | (VBD saw) (NP (NP (DT the) (NN hat)) (SBAR (WHNP (WDT that)) (S (VP (VBD lay) (PP (IN on) (NP"
        " (NN grass)))))))",
    "Ada saw the nun while we left.":
        "NUN | (VBD saw) (NP (NNP Ada)) (SBAR (IN while) (S (NP (PRP we)) (VP (VBD left))))",
    "The cook was shut down by the nun.":
        "NUN | (VBD was) (VP (VBN shut) (PRT (RP down)) (PP (IN by) (NP (DT the) (NN cook))))",
    "The cook saw the nun because Ada left.":
        "NUN | (VBD saw) (NP (DT the) (NN cook)) (SBAR (IN because) (S (NP (NNP Ada)) (VP (VBD left))))",
    "The cook saw the nun when we left.":
        "NUN | (VBD saw) (NP (DT the) (NN cook)) (SBAR (WRB when) (S (NP (PRP we)) (VP (VBD left))))",
    "He asked me to help Ada.": "(PRP I) | (VBD asked) (NP (PRP him)) (S (VP (TO to) (VP (VB help) (NP (NNP Ada)))))",
    "Ada chose me and nuns couldn't sleep.":
        "(S (S (NP (PRP I)) (VP (VBD chose) (NP (NNP Ada)))) (CC and) (S (NP (NNS nuns)) (VP (MD could) (RB n't)"
        " (VP (VB sleep)))) (. .))",
    "Water drank the nun.": "NUN | (VBD drank) (NP (NN water))",
    "Ada saw the old, sad nun.": "(DT The) (JJ old) (, ,) (JJ sad) (NN nun) | (VBD saw) (NP (NNP Ada))",
    "He told Ada to leave.": "(NNP Ada) | (VBD told) (NP (PRP him)) (S (VP (TO to) (VP (VB leave))))",
    "Ada contacted the nun.": "NUN | (VBD contacted) (NP (NNP Ada))",
    "Ada accompanied the nun.": "NUN | (VBD accompanied) (NP (NNP Ada))",
    "A cook of hats robbed a nun.":
        "(DT A) (NN nun) | (VBD robbed) (NP (NP (DT a) (NN cook)) (PP (IN of) (NP (NNS hats))))",
    "A cat that sat saw a nun.":
        "(DT A) (NN nun) | (VBD saw) (NP (NP (DT a) (NN cat)) (SBAR (WHNP (WDT that)) (S (VP (VBD sat)))))",
    "The hat gave a nun to Ada.": "(DT A) (NN nun) | (VBD gave) (NP (DT the) (NN hat)) (PP (TO to) (NP (NNP Ada)))",
    "The nuns saw young dogs.": "(JJ Young) (NNS dogs) | (VBD saw) (NP (DT the) (NNS nuns))",
    "The nuns saw critics.": "(NNS Critics) | (VBD saw) (NP (DT the) (NNS nuns))",
    "The nuns saw firemen.": "(NNS Firemen) | (VBD saw) (NP (DT the) (NNS nuns))",
    "The nuns saw food.": "(NN Food) | (VBD saw) (NP (DT the) (NNS nuns))",
    "The rain felt the nun.": "NUN | (VBD felt) (NP (DT the) (NN rain))",
    "The songs sang the choir.": "(DT The) (NN choir) | (VBD sang) (NP (DT the) (NNS songs))",
    "The choir was sung by the songs.":
        "(DT The) (NNS songs) | (VBD were) (VP (VBN sung) (PP (IN by) (NP (DT the) (NN choir))))",
    "A painter painted the nun.": "NUN | (VBD painted) (NP (DT a) (NN painter))",
    "A sea saw the nun.": "NUN | (VBD saw) (NP (DT a) (NN sea))",
    "A knight saw the nun.": "NUN | (VBD saw) (NP (DT a) (NN knight))",
    "Cowards saw the nun.": "NUN | (VBD saw) (NP (NNS cowards))",
    "The siege saw the nun.": "NUN | (VBD saw) (NP (DT the) (NN siege))",
    "He pushed the nun backwards.": "NUN | (VBD pushed) (NP (PRP him)) (ADVP (RB backwards))",
    "He began crying, and Ada saw the nun.":
        "(S (S (NP (PRP He)) (VP (VBD began) (VP (VBG crying)))) (, ,) (CC and) (S (NP (DT the) (NN nun)) (VP (VBD saw)"
        " (NP (NNP Ada)))) (. .))",
    "Knowing that Ada saw him, I left.":
        "(S (S (VP (VBG Knowing) (SBAR (IN that) (S (NP (PRP he)) (VP (VBD saw) (NP (NNP Ada))))))) (, ,) (NP (PRP I))"
        " (VP (VBD left)) (. .))",
    "Ada sent him to Bonn and Rome.":
        "(PRP He) | (VBD sent) (NP (NNP Ada)) (PP (TO to) (NP (NNP Bonn) (CC and) (NNP Rome)))",
}  # fmt: skip


def gold_and_parsed(line):
    """The sentence of a tree, as from a treebank and as from a parser."""
    tree = line.replace("NUN", "(DT The) (NN nun)")
    if " | " in tree:
        tree = "(S (NP {}) (VP {}) (. .))".format(*tree.split(" | "))
    gold = sentence(tree)
    return gold, dataclasses.replace(gold, constituents=dataclasses.replace(gold.constituents, automatic=True))


def lines(table):
    """Each tree of a table with its reason."""
    split = re.compile(r"\n {8}(?! )|\n {4}$")
    return [(tree, reason) for reason, trees in table.items() for tree in filter(None, split.split(trees))]


@pytest.mark.parametrize(("tree", "reason"), lines(SKIPPED))
def test_what_cannot_be_swapped_is_skipped_with_a_reason(tree, reason):
    agreement = "skip" if reason == "the verb would not agree with its new subject" else "reinflect"
    probe = semantic_role_swap(gold_and_parsed(tree), source="constituents", agreement=agreement)
    assert len(probe) == 0
    assert reason in probe_info(probe).skipped


@pytest.mark.parametrize(("tree", "reason"), lines(SKIPPED_IF_PARSED))
def test_what_only_a_treebank_can_tell_is_swapped_in_treebanks_only(tree, reason):
    probe = semantic_role_swap(gold_and_parsed(tree), source="constituents", agreement="reinflect")
    assert len(probe) == 1
    assert probe_info(probe).skipped == {reason: 1}


@pytest.mark.parametrize("made", SWAPPED)
def test_clauses_that_fit_the_pattern_are_swapped(made):
    gold, _ = gold_and_parsed(SWAPPED[made])
    assert semantic_role_swap([gold], source="constituents", agreement="reinflect")["hypothesis"] == [made]


@pytest.mark.parametrize(
    ("tree", "made"),
    [
        ("(S (NP (NP (DT A) (NN nun)) (PP (IN in) (NP (NN red)))) (VP (VBD rode) (NP (DT a) (NN bike))) (. .))",
         "A bike rode a nun in red."),
        ("(DT The) (NNS nuns) | (VBD were) (VP (VBN robbed) (PP (IN by) (NP (DT a) (NN cook))))",
         "A cook was robbed by the nuns."),
        ("(NP (DT The) (NN nun)) (PP (IN near) (NP (DT the) (NN park))) | (VBD was) (VP (VBN seen) (PP (IN by)"
         " (NP (DT a) (JJ tall) (NN cook))) (NP (NN yesterday)))",
         "A tall cook was seen by the nun near the park yesterday."),
        ("(DT A) (JJ young) (NN judge) | (MD will) (VP (VB be) (VP (VBN paid) (PP (IN by) (NP (DT the) (NN nun)))))",
         "The nun will be paid by a young judge."),
    ],
)  # fmt: skip
def test_plain_automatic_trees_are_swapped(tree, made):
    _, parsed = gold_and_parsed(tree)
    assert semantic_role_swap([parsed], source="constituents", agreement="reinflect")["hypothesis"] == [made]


def test_tags_may_be_a_list():
    read = list(read_frames(EXAMPLES / "frames.jsonl"))
    trees = [dataclasses.replace(each.constituents, tags=list(each.constituents.tags)) for each in read]
    lists = [dataclasses.replace(each, constituents=tree) for each, tree in zip(read, trees, strict=True)]
    made, made_of_lists = (semantic_role_swap(each)["hypothesis"] for each in (read, lists))
    assert len(made) > 20
    assert list(made) == list(made_of_lists)
