/* A stand-in for libnvidia-ml.so.1: two H200s on NVSwitch, one of them computing.
 * Built by tests/unit/test_facts_nvml.py so that the real pynvml binding is exercised without a GPU.
 * Struct layouts and signatures follow nvml.h (memory v2, process info v2/v3, PCI info v3).
 * STUB_HANG=1 hangs in the first call, STUB_INIT=N makes it return error N, STUB_MIG=1 splits card 1. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef void *Device;
typedef unsigned long long u64;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { u64 total, free, used; } Memory1;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char busId[32]; } Pci;
typedef struct { unsigned pid; u64 memory; unsigned gi, ci; } Process;
typedef struct { unsigned gpu, memory; } Rates;

enum { OK = 0, BAD = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SMALL = 7 };
static const u64 MiB = 1048576ULL;
static long id(Device d) { return (long)d - 1; }
static int flag(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; if (flag("STUB_HANG")) sleep(60); return flag("STUB_INIT"); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "stub error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "580.95.05"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return OK; }
int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned n) { snprintf(out, n, "python%u", pid); return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *out) { *out = (Device)(long)(i + 1); return i < 2 ? OK : BAD; }
int nvmlDeviceGetHandleByUUID(const char *u, Device *out) {
    *out = (Device)(strstr(u, "bbbb") ? 2L : 1L); return OK; }
int nvmlDeviceGetIndex(Device d, unsigned *out) { *out = id(d); return OK; }
int nvmlDeviceGetUUID(Device d, char *out, unsigned n) {
    if (id(d) >= 10) snprintf(out, n, "MIG-%08lx-0000-0000-0000-000000000000", id(d));
    else snprintf(out, n, id(d) ? "GPU-bbbb2222-0000-0000-0000-000000000001" : "GPU-aaaa1111-0000-0000-0000-000000000000");
    return OK; }
int nvmlDeviceGetName(Device d, char *out, unsigned n) {
    snprintf(out, n, id(d) >= 10 ? "NVIDIA H200 MIG 3g.71gb" : "NVIDIA H200"); return OK; }
int nvmlDeviceGetMemoryInfo_v2(Device d, Memory2 *m) {
    if (m->version != 0x02000028) return 25;
    if (id(d) >= 10) { m->total = 70144 * MiB; m->reserved = 0; m->used = 44 * MiB; m->free = m->total - m->used; return OK; }
    m->total = 143771 * MiB; m->reserved = 600 * MiB; m->used = id(d) ? 4 * MiB : 20000 * MiB;
    m->free = m->total - m->reserved - m->used; return OK; }
int nvmlDeviceGetMemoryInfo(Device d, Memory1 *m) {
    m->total = 143771 * MiB; m->used = id(d) ? 604 * MiB : 20600 * MiB; m->free = m->total - m->used; return OK; }
int nvmlDeviceGetCudaComputeCapability(Device d, int *major, int *minor) { (void)d; *major = 9; *minor = 0; return OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(Device d, unsigned *o) { *o = id(d) ? 5 : 4; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device d, unsigned *o) { (void)d; *o = 5; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(Device d, unsigned *o) { (void)d; *o = 16; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(Device d, unsigned *o) { (void)d; *o = 16; return OK; }
int nvmlDeviceGetPciInfo_v3(Device d, Pci *p) {
    memset(p, 0, sizeof *p); p->bus = id(d) ? 0x3d : 0x1b;
    snprintf(p->busId, sizeof p->busId, "00000000:%02X:00.0", p->bus); return OK; }
int nvmlDeviceGetMigMode(Device d, unsigned *now, unsigned *later) {
    *now = *later = (flag("STUB_MIG") && id(d) == 1); return OK; }
int nvmlDeviceGetMaxMigDeviceCount(Device d, unsigned *o) { (void)d; *o = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device d, unsigned i, Device *o) {
    (void)d; if (i > 1) return NOT_FOUND; *o = (Device)(long)(11 + i); return OK; }
static int list(Device d, unsigned *count, Process *out) {
    unsigned n = id(d) == 0 ? 1 : 0;
    if (n > *count) { *count = n; return SMALL; }
    if (n && out) { out[0].pid = (unsigned)flag("STUB_PID"); out[0].memory = 19990 * MiB; out[0].gi = out[0].ci = ~0u; }
    *count = n; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *c, Process *p) { return list(d, c, p); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device d, unsigned *c, Process *p) { (void)d; (void)p; *c = 0; return OK; }
int nvmlDeviceGetP2PStatus(Device a, Device b, int capability, int *o) { (void)a; (void)b; (void)capability; *o = 0; return OK; }
int nvmlDeviceGetUtilizationRates(Device d, Rates *r) { r->gpu = id(d) ? 0 : 97; r->memory = id(d) ? 0 : 41; return OK; }
int nvmlDeviceGetPowerUsage(Device d, unsigned *o) { *o = id(d) ? 76123 : 655432; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(Device d, unsigned *o) { (void)d; *o = 700000; return OK; }
int nvmlDeviceGetTemperature(Device d, int sensor, unsigned *o) { (void)sensor; *o = id(d) ? 30 : 64; return OK; }
int nvmlDeviceGetClockInfo(Device d, int kind, unsigned *o) { (void)d; *o = kind == 1 ? 1980 : 3201; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(Device d, u64 *o) { *o = id(d) ? 0x1 : 0x4; return OK; }
int nvmlDeviceGetPcieThroughput(Device d, int counter, unsigned *o) { (void)d; *o = counter ? 2000 : 1000; return OK; }
