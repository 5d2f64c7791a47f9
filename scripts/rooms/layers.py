# derive layer order for each package from the real imports (module level), print
import ast,subprocess,collections,networkx as nx,sys
files=subprocess.check_output(['git','ls-files','memplan/*.py'],text=True).split()
mods={f[:-3].replace('/','.').removesuffix('.__init__'):f for f in files}
E=collections.defaultdict(set)
def tc(tree):
    skip=set()
    for n in ast.walk(tree):
        if isinstance(n,ast.If) and 'TYPE_CHECKING' in ast.unparse(n.test):
            for x in n.body:
                for y in ast.walk(x): skip.add(id(y))
    return skip
for m,f in mods.items():
    t=ast.parse(open(f).read()); sk=tc(t)
    for n in ast.walk(t):
        if id(n) in sk: continue
        if isinstance(n,ast.ImportFrom) and (n.module or '').startswith('memplan'):
            for a in n.names:
                full=f'{n.module}.{a.name}'
                E[m].add(full if full in mods else n.module)
pk={m for m,f in mods.items() if f.endswith('__init__.py')}
for p in sorted(pk):
    kids={m for m in mods if m.startswith(p+'.') and m.count('.')==p.count('.')+1}
    g=nx.DiGraph(); g.add_nodes_from(k.split('.')[-1] for k in kids)
    for m in mods:
        if not m.startswith(p+'.'): continue
        a=m[len(p)+1:].split('.')[0]
        for d in E[m]:
            if d.startswith(p+'.'):
                b=d[len(p)+1:].split('.')[0]
                if a!=b: g.add_edge(a,b)
    cyc=[c for c in nx.strongly_connected_components(g) if len(c)>1]
    if cyc: print('CYCLES',p,cyc,[e for e in g.edges if any(e[0] in c and e[1] in c for c in cyc)])
    else:
        gens=list(nx.topological_generations(g)); 
        # place each node as low as possible
        lv={}
        for n in reversed(list(nx.topological_sort(g))): lv[n]=1+max((lv[s] for s in g.successors(n)),default=-1)
        by=collections.defaultdict(list)
        for n,l in lv.items(): by[l].append(n)
        print('['+p+']'); 
        for l in sorted(by,reverse=True): print('    '+' | '.join(sorted(by[l])))
