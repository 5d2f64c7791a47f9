"""Moves symbols between modules and writes what scripts cannot guess. Run after move.py and rename.py."""
import ast,re,subprocess,pathlib
def git(*a): return subprocess.check_output(['git',*a],text=True)
P=pathlib.Path
def modfile(m):
    p=P(m.replace('.','/')+'.py')
    return p if p.exists() else P(m.replace('.','/')+'/__init__.py')
def cut(m,names):
    p=modfile(m); s=p.read_text(); t=ast.parse(s); lines=s.splitlines(keepends=True); out=[]
    spans=[]
    for n in t.body:
        nm=getattr(n,'name',None) or (n.targets[0].id if isinstance(n,ast.Assign) and isinstance(n.targets[0],ast.Name) else None)
        if nm in names:
            a=(n.decorator_list[0].lineno if getattr(n,'decorator_list',None) else n.lineno)-1
            spans.append((nm,a,n.end_lineno))
    assert {x[0] for x in spans}==set(names),(m,names,spans)
    out={nm:''.join(lines[a:b]) for nm,a,b in spans}
    for nm,a,b in sorted(spans,key=lambda x:-x[1]): del lines[a:b]
    p.write_text(''.join(lines))
    return [out[n] for n in names]
def reimport(names,old,new):
    """`from old import name` -> `from new import name` in all files"""
    for f in git('ls-files','*.py').split():
        p=P(f)
        if not p.exists(): continue
        s=p.read_text()
        try: t=ast.parse(s)
        except SyntaxError: continue
        edits=[]
        for n in ast.walk(t):
            if isinstance(n,ast.ImportFrom) and n.module==old and any(a.name in names for a in n.names):
                ind=' '*n.col_offset
                g={}
                for a in n.names: g.setdefault(new if a.name in names else old,[]).append(a.name+(f' as {a.asname}' if a.asname else ''))
                edits.append((n.lineno-1,n.end_lineno,''.join(f'{ind}from {m} import ({", ".join(v)})\n' if len(v)>3 else f'{ind}from {m} import {", ".join(v)}\n' for m,v in g.items())))
        if edits:
            L=s.splitlines(keepends=True)
            for a,b,x in sorted(edits,reverse=True): L[a:b]=[x]
            p.write_text(''.join(L))
# 1. Plan is data; making and checking it is planning
fs=cut('memplan.core.plan',['make_plan'])
P('memplan/planning/make_plan.py').write_text('''"""Placing a scheduled graph: the last step of making a plan."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.core import lifetimes
from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule
from memplan.solvers import Solver, solve


'''+fs[0])
names=['check_consistency','check_sections','require_budget','_check_schedule']
fs=cut('memplan.core.plan',names)
src=P('memplan/core/plan.py').read_text()
header=src[:src.index('class Plan:')].replace('@dataclass(frozen=True, kw_only=True)\n','')
header=re.sub(r'^""".*?"""\n','"""Checking a plan that comes from a file: every part must follow from its graph."""\n',header,flags=re.S)
header=header.replace('from __future__ import annotations\n','from __future__ import annotations\n\nfrom memplan.core.plan import Plan\nfrom memplan.core.problem import Solution, Status\n',1)
header=header[:header.index('SCHEMA_VERSION =')] if 'SCHEMA_VERSION =' in header else header
P('memplan/planning/consistency.py').write_text(header+'\n\n'+'\n\n'.join(fs))
reimport({'make_plan'},'memplan.core.plan','memplan.planning.make_plan')
reimport({'check_consistency','check_sections','require_budget'},'memplan.core.plan','memplan.planning.consistency')
# 2. working set of a graph is core's
ws=cut('memplan.schedule.bounds.cut',['working_set','_touched_bytes','working_set_bound'])
p=P('memplan/core/schedule.py'); s=p.read_text()
p.write_text(s.rstrip('\n')+'\n\n\n'+'\n\n'.join(ws).replace('def _touched_bytes','def _touched_bytes'))
s=p.read_text().replace('from memplan.core.graph import Graph\n','from memplan.core.graph import Graph, Op\n').replace('from memplan.schedule.bounds.cut import working_set\n','')
p.write_text(s)
reimport({'working_set','working_set_bound'},'memplan.schedule.bounds.cut','memplan.core.schedule')
# 3. core does not import rooms that come after it
for f in ('memplan/core/lifetimes.py','memplan/core/plan.py','memplan/planning/consistency.py'):
    p=P(f); s=p.read_text()
    s=re.sub(r'from memplan\.schedule import (.*)\n',lambda m:''.join(
        f'from {"memplan.schedule" if n.strip() in ("require_evidence",) else "memplan.core.legal_orders" if n.strip() in ("require_legal","predecessors") else "memplan.core.schedule"} import {n.strip()}\n' for n in m.group(1).split(',')),s)
    p.write_text(s)
# 4. public names
p=P('memplan/__init__.py'); s=p.read_text()
for a,b in {'"memplan.plan"':'"memplan.core.plan"','"memplan.diff"':'"memplan.analysis.diff"','"memplan.explain"':'"memplan.analysis.explain"','"memplan.solve"':'"memplan.solvers"','"memplan.validate"':'"memplan.core.validate"','import_module("memplan.csvio")':'import_module("memplan.core.csvio")'}.items(): s=s.replace(a,b)
i=s.index('class _Package('); j=s.index('sys.modules[__name__].__class__'); k=s.index('\n',j)
s=s[:i]+s[k+1:].lstrip('\n')
s=s.replace('import sys\n','').replace('from types import ModuleType\n','')
p.write_text(s)
git('mv','memplan/plan.schema.json','memplan/planning/plan.schema.json')
p=P('tests/core/test_jsonschema.py'); s=p.read_text().replace('memplan/plan.schema.json','memplan/planning/plan.schema.json').replace('files("memplan")','files("memplan.planning")'); p.write_text(s)
p=P('pyproject.toml'); p.write_text(p.read_text().replace('"*.schema.json"','"planning/*.schema.json"'))
# lazy policies live in sub-rooms now
for f,room in (('memplan/schedule/select.py','schedule'),('memplan/evict/select.py','evict')):
    q=P(f); s=q.read_text()
    def home(m,room=room):
        mod=m.group(2)
        for sub in ('policies.','search.',''):
            if P(f'memplan/{room}/{sub.replace(".","/")}{mod}.py').exists(): return f'{m.group(1)}("{sub}{mod}", {m.group(3)})'
        raise SystemExit(f'no home of {mod}')
    s=re.sub(r'(: )\("(\w+)", ("\w+")\)',home,s)
    q.write_text(s)
# 5. rooms say what they are
for l in re.split(r'\n\n(?=memplan/)', P('/tmp/move/rooms.txt').read_text()):
    if not l.strip(): continue
    name,_,text=l.strip().partition('\n')
    f=P(name+'/__init__.py'); s=f.read_text() if f.exists() else ''
    t=ast.parse(s)
    body=''
    if t.body and isinstance(t.body[0],ast.Expr): body=''.join(s.splitlines(keepends=True)[t.body[0].end_lineno:])
    f.write_text('"""'+text.strip()+('\n"""' if '\n' in text.strip() else '"""')+'\n'+body)
P('.importlinter').write_text(P('/tmp/move/importlinter').read_text())
git('add','-A')
# 6. inside a room, files import each other, not the room's front door
import collections
files=[f for f in git('ls-files','memplan/*.py').split()]
origin={}
for f in files:
    if f.endswith('__init__.py'):
        pkg=f[:-12].replace('/','.')
        for n in ast.parse(P(f).read_text()).body:
            if isinstance(n,ast.ImportFrom):
                for a in n.names: origin[(pkg,a.asname or a.name)]=n.module
for f in files:
    if f.endswith('__init__.py'): continue
    m=f[:-3].replace('/','.'); s=P(f).read_text(); t=ast.parse(s); edits=[]
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom) and n.module and m.startswith(n.module+'.') and n.module!='memplan':
            g=collections.defaultdict(list)
            for a in n.names: g[origin.get((n.module,a.name),n.module)].append(a.name+(f' as {a.asname}' if a.asname else ''))
            ind=' '*n.col_offset
            edits.append((n.lineno-1,n.end_lineno,''.join(f'{ind}from {k} import {", ".join(v)}\n' for k,v in g.items())))
        # schedule's facade for what is core's
        elif isinstance(n,ast.ImportFrom) and n.module=='memplan.schedule' :
            g=collections.defaultdict(list)
            for a in n.names:
                o=origin.get((n.module,a.name),n.module); g[o if o.startswith('memplan.core') else n.module].append(a.name+(f' as {a.asname}' if a.asname else ''))
            ind=' '*n.col_offset
            if set(g)!={n.module}: edits.append((n.lineno-1,n.end_lineno,''.join(f'{ind}from {k} import {", ".join(v)}\n' for k,v in g.items())))
    if edits:
        L=s.splitlines(keepends=True)
        for a,b,x in sorted(edits,reverse=True): L[a:b]=[x]
        P(f).write_text(''.join(L))
# 7. Plan delegates without an import statement
p=P('memplan/core/plan.py'); s=p.read_text()
import textwrap
s=re.sub(r'        from memplan\.(report|planning|analysis)\.([\w.]+) import (\w+)\n',lambda m:f'        {m.group(3)} = _function("memplan.{m.group(1)}.{m.group(2)}", "{m.group(3)}")\n',s)
for a,b in {'        return forecast(self, name)':'        found: Forecast = forecast(self, name)\n        return found',
 '        return make_report(self)':'        made: Report = make_report(self)\n        return made',
 '        return partition_table(self.problem) + stack':'        text: str = partition_table(self.problem) + stack\n        return text'}.items():
    assert a in s,a
    s=s.replace(a,b)
s=re.sub(r'(= _function\(.*\)\n)\n',r'\1',s)
s=s.replace('\n@dataclass(frozen=True, kw_only=True)\nclass Plan:','''
def _function(module: str, name: str) -> Any:
    """A function of a later room, imported when a method that delegates to it is called: `Plan` itself is data."""
    return getattr(import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class Plan:''',1)
s=s.replace('from functools import','from importlib import import_module\nfrom functools import',1)
p.write_text(s)
git('add','-A')
