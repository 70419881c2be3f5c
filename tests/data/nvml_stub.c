/* A stand-in for libnvidia-ml.so.1: two H200s on NVSwitch, one of them computing.
 * Built by tests/unit/test_facts_nvml.py so that the real pynvml binding is exercised without a GPU.
 * Struct layouts and signatures follow nvml.h (memory v2, process info v2/v3, PCI info v3).
 * STUB_HANG=1 hangs in the first call, STUB_INIT=N makes it return error N, STUB_MIG=1 splits card 1.
 * STUB_CARDS=N: that many cards instead of two. STUB_USEC=N: a reading takes N microseconds, half of them computing.
 * STUB_HANG_AT=N, STUB_FAIL_AT=N: from the Nth reading of a card's utilisation on, hang or lose every card
 * (STUB_FAIL_FOR=N: for N readings only). STUB_NO_COUNTERS=1: a driver that does not count NVLink bytes.
 * STUB_OLD=1: a driver without the second version of its memory figures. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
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
static int cards(void) { return flag("STUB_CARDS") ? flag("STUB_CARDS") : 2; }
static double now(int clock) { struct timespec t; clock_gettime(clock, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static int readings;
static int lost(void) {
    int from = flag("STUB_FAIL_AT"), n = flag("STUB_FAIL_FOR");
    return from && readings >= from && !(n && readings >= from + n); }
/* What a call into the driver costs: some of the time on this core, the rest waiting for the card. */
static void cost(int usec) {
    if (usec <= 0) return;
    double end = now(CLOCK_THREAD_CPUTIME_ID) + usec * 0.5e-6;
    while (now(CLOCK_THREAD_CPUTIME_ID) < end) { }
    usleep((unsigned)(usec - usec / 2)); }

int nvmlInitWithFlags(unsigned flags) { (void)flags; if (flag("STUB_HANG")) sleep(60); return flag("STUB_INIT"); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "stub error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "580.95.05"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return OK; }
int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned n) { snprintf(out, n, "python%u", pid); return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = cards(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *out) {
    *out = (Device)(long)(i + 1); return (int)i < cards() ? OK : BAD; }
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
    cost(flag("STUB_USEC")); if (lost()) return 15;
    if (flag("STUB_OLD")) return 13;
    if (m->version != 0x02000028) return 25;
    if (id(d) >= 10) { m->total = 70144 * MiB; m->reserved = 0; m->used = 44 * MiB; m->free = m->total - m->used; return OK; }
    m->total = 143771 * MiB; m->reserved = 600 * MiB; m->used = id(d) ? 4 * MiB : 20000 * MiB;
    m->free = m->total - m->reserved - m->used; return OK; }
int nvmlDeviceGetMemoryInfo(Device d, Memory1 *m) {
    if (lost()) return 15;
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
int nvmlDeviceGetUtilizationRates(Device d, Rates *r) {
    readings++; cost(flag("STUB_USEC")); if (lost()) return 15;
    if (flag("STUB_HANG_AT") && readings >= flag("STUB_HANG_AT")) sleep(3600);
    r->gpu = id(d) ? 0 : 97; r->memory = id(d) ? 0 : 41; return OK; }
int nvmlDeviceGetPowerUsage(Device d, unsigned *o) { cost(flag("STUB_USEC")); *o = id(d) ? 76123 : 655432; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(Device d, unsigned *o) { (void)d; *o = 700000; return OK; }
int nvmlDeviceGetTemperature(Device d, int sensor, unsigned *o) { (void)sensor; *o = id(d) ? 30 : 64; return OK; }
int nvmlDeviceGetClockInfo(Device d, int kind, unsigned *o) { (void)d; *o = kind == 1 ? 1980 : 3201; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(Device d, u64 *o) { *o = id(d) ? 0x1 : 0x4; return OK; }
int nvmlDeviceGetPcieThroughput(Device d, int counter, unsigned *o) {
    (void)d; if (flag("STUB_USEC")) usleep(20000); *o = counter ? 2000 : 1000; return OK; }
typedef struct { unsigned fieldId, scopeId; long long timestamp, latency; int type, status; u64 value; } Field;
/* Counters: 40 and 30 GB/s over a card's NVLinks (link 0: a sixth of it). */
int nvmlDeviceGetFieldValues(Device d, int n, Field *f) {
    (void)d; cost(flag("STUB_USEC"));
    for (int i = 0; i < n; i++) {
        double rate = f[i].fieldId == 138 ? 40e9 / 1024 : f[i].fieldId == 139 ? 30e9 / 1024 : 0;
        if (f[i].scopeId != ~0u) rate /= 6;
        f[i].type = 3; f[i].status = flag("STUB_NO_COUNTERS") || rate == 0 ? UNSUPPORTED : OK;
        f[i].value = (u64)(rate * now(CLOCK_MONOTONIC)); }
    return OK; }
