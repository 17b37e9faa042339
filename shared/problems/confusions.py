"""What programmers take for what: operators, methods, built-ins, exceptions. The rules that use it: `mutation_rules`."""

from __future__ import annotations

import ast

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Pow),
    ast.Div: (ast.FloorDiv, ast.Mult),
    ast.FloorDiv: (ast.Div, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd, ast.BitXor),
    ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
ORDERED = (ast.Add, ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift)  # a op b is not b op a


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _pairs(text: str) -> dict[str, tuple[str, ...]]:
    """`a:b,c d:e` → what each name is mistaken for."""
    return {left: tuple(right.split(",")) for left, right in (item.split(":") for item in text.split())}


METHODS = _pairs(
    "lower:upper,title upper:lower title:capitalize capitalize:title strip:lstrip,rstrip lstrip:rstrip,strip "
    "rstrip:lstrip,strip startswith:endswith endswith:startswith find:rfind,index rfind:find index:find,rindex rindex:index "
    "split:rsplit,partition rsplit:split partition:rpartition rpartition:partition splitlines:split keys:values,items "
    "values:keys items:keys,values isdigit:isalpha,isalnum isalpha:isdigit,isalnum isalnum:isalpha,isdigit "
    "isupper:islower islower:isupper isspace:isalnum ljust:rjust rjust:ljust center:ljust zfill:rjust "
    "removeprefix:removesuffix,lstrip removesuffix:removeprefix,rstrip append:extend extend:append add:discard discard:add "
    "union:intersection intersection:union difference:union issubset:issuperset issuperset:issubset "
    "match:search,fullmatch search:match fullmatch:match findall:split floor:ceil ceil:floor sin:cos cos:sin "
    "dirname:basename basename:dirname get:setdefault popleft:pop bisect_left:bisect_right "
    "bisect_right:bisect_left product:permutations permutations:combinations combinations:permutations"
)
BUILTINS = _pairs(
    "min:max max:min any:all all:any sum:max,len len:max sorted:list,reversed reversed:sorted,list int:float,round "
    "float:int round:int str:repr repr:str abs:int list:set,tuple tuple:list set:list ord:int zip:map divmod:pow bin:hex "
    "hex:oct oct:hex enumerate:zip"
)
IDENTITIES = _set("abs bool float int list reversed round set sorted str tuple")  # f(x) forgotten: x
CLEANERS = _set("lower upper strip lstrip rstrip title capitalize casefold copy items swapcase splitlines")
EXCEPTIONS = ("ValueError", "KeyError", "IndexError", "TypeError", "AttributeError")
