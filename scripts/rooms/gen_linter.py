import ast,subprocess,collections,networkx as nx
exec(open('/tmp/move/layers.py').read().split("pk={m for")[0])
pk={m for m,f in mods.items() if f.endswith('__init__.py')}
LAZY={('memplan.core.plan','memplan.report'),('memplan.core.plan','memplan.planning.planfile'),('memplan.core.plan','memplan.analysis.forecast'),('memplan.symbolic.plan','memplan.symbolic.planfile'),('memplan.symbolic.plan','memplan.symbolic.text')}
def lazy(a,b): return any(a==x and (b==y or b.startswith(y+'.')) for x,y in LAZY)
ROOT='''    __main__
    cli | pytest_plugin
    demo_model
    runtime
    trace
    symbolic
    report
    check
    analysis | verify
    recording
    planning
    evict
    schedule | solvers
    core
    errors
    version'''
out=['''[importlinter]
root_package = memplan
include_external_packages = True
exclude_type_checking_imports = True

[importlinter:contract:rooms]
name = Data flows one way through the rooms
type = layers
containers = memplan
layers =
'''+ROOT+'''
exhaustive = True
''']
for p in sorted(pk):
    if p=='memplan': continue
    kids={m for m in mods if m.startswith(p+'.') and m.count('.')==p.count('.')+1}
    if len(kids)<2: continue
    g=nx.DiGraph(); g.add_nodes_from(k.split('.')[-1] for k in kids)
    for m in mods:
        if not m.startswith(p+'.'): continue
        a=m[len(p)+1:].split('.')[0]
        for d in E[m]:
            if lazy(m,d): continue
            if d.startswith(p+'.'):
                b=d[len(p)+1:].split('.')[0]
                if a!=b: g.add_edge(a,b)
    lv={}
    for n in reversed(list(nx.topological_sort(g))): lv[n]=1+max((lv[s] for s in g.successors(n)),default=-1)
    by=collections.defaultdict(list)
    for n,l in lv.items(): by[l].append(n)
    room=p.removeprefix('memplan.')
    ign=[f'    {x} -> {y}' for x,y in sorted(LAZY) if x.startswith(p+'.') and y.startswith(p+'.')]
    out.append(f'[importlinter:contract:{room.replace(".","-")}]\nname = Inside {room.replace(".","/")}/\ntype = layers\ncontainers = {p}\n'+('ignore_imports =\n'+'\n'.join(ign)+'\n' if ign else '')+'layers =\n'+'\n'.join('    '+' | '.join(sorted(by[l])) for l in sorted(by,reverse=True))+'\nexhaustive = True\n')
out.append('''[importlinter:contract:torch-free]
name = Planning needs no torch
type = forbidden
source_modules =
    memplan.errors
    memplan.core
    memplan.schedule
    memplan.solvers
    memplan.evict
    memplan.planning
    memplan.recording
    memplan.symbolic
    memplan.analysis
    memplan.verify
    memplan.check
    memplan.report
    memplan.cli
ignore_imports =
    memplan.cli.source -> memplan.trace
    memplan.cli.budget -> memplan.trace.torch_budget
    memplan.cli.demo -> memplan.demo_model
    memplan -> memplan.trace
forbidden_modules =
    torch
allow_indirect_imports = False

[importlinter:contract:oracle]
name = The validator shares no code with the solvers
type = forbidden
source_modules = memplan.core.validate
forbidden_modules = memplan.solvers
''')
open('/tmp/move/importlinter','w').write('\n'.join(out))
