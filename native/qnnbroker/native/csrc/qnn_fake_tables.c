/* SPDX-License-Identifier: Apache-2.0
 *
 * The two entry points and the function tables behind them.
 *
 * Slots that the fake does not implement are set, like in the real library, and give 1000 whatever
 * their arguments are: the calling convention lets a function ignore arguments that it is passed.
 */
#include "qnn_fake.h"

#include <string.h>

#define PROVIDER "QNNBROKER_FAKE"
#define SYSTEM_PROVIDER "QNNBROKER_FAKE_SYSTEM"

#define NOT_HERE(X)                                                                              \
    X(5, backendRegisterOpPackage)                                                               \
    X(6, backendGetSupportedOperations)                                                          \
    X(7, backendValidateOpConfig)                                                                \
    X(9, contextCreate)                                                                          \
    X(12, contextGetBinary)                                                                      \
    X(15, graphCreate)                                                                           \
    X(16, graphCreateSubgraph)                                                                   \
    X(18, graphAddNode)                                                                          \
    X(22, graphExecuteAsync)                                                                     \
    X(23, tensorCreateContextTensor)                                                             \
    X(24, tensorCreateGraphTensor)                                                               \
    X(28, profileCreate)                                                                         \
    X(29, profileSetConfig)                                                                      \
    X(30, profileGetEvents)                                                                      \
    X(31, profileGetSubEvents)                                                                   \
    X(32, profileGetEventData)                                                                   \
    X(33, profileGetExtendedEventData)                                                           \
    X(34, profileFree)                                                                           \
    X(41, deviceSetConfig)                                                                       \
    X(44, signalCreate)                                                                          \
    X(45, signalSetConfig)                                                                       \
    X(46, signalTrigger)                                                                         \
    X(47, signalFree)                                                                            \
    X(49, errorGetVerboseMessage)                                                                \
    X(50, errorFreeVerboseMessage)                                                               \
    X(51, graphPrepareExecutionEnvironment)                                                      \
    X(52, graphReleaseExecutionEnvironment)                                                      \
    X(53, graphGetProperty)                                                                      \
    X(54, contextValidateBinary)                                                                 \
    X(55, contextCreateFromBinaryWithSignal)                                                     \
    X(56, contextCreateFromBinaryListAsync)                                                      \
    X(57, tensorUpdateGraphTensors)                                                              \
    X(58, tensorUpdateContextTensors)                                                            \
    X(59, contextGetBinarySectionSize)                                                           \
    X(60, contextGetBinarySection)                                                               \
    X(61, contextApplyBinarySection)                                                             \
    X(62, backendGetProperty)                                                                    \
    X(63, contextGetProperty)                                                                    \
    X(64, contextGetIncrementalBinary)                                                           \
    X(65, contextReleaseIncrementalBinary)                                                       \
    X(66, contextFinalize)                                                                       \
    X(67, globalConfigSet)

static uint64_t refuse(const char *name) {
    struct fake_call call;

    fake_begin(&call, name);
    return fake_end(&call, FAKE_NOT_SUPPORTED);
}

static uint64_t not_here(void) {
    return refuse("unknownSlot");
}

#define REFUSAL(slot, name)                                                                      \
    static uint64_t not_here_##slot(void) {                                                      \
        return refuse(#name);                                                                    \
    }
NOT_HERE(REFUSAL)

#define AT(slot, function) [slot] = (fake_function)function
#define REFUSED_AT(slot, name) [slot] = (fake_function)not_here_##slot,

static const fake_function core_functions[FAKE_CORE_SLOTS] = {
    NOT_HERE(REFUSED_AT)
    AT(0, fake_property_has_capability),
    AT(1, fake_backend_create),
    AT(2, fake_backend_set_config),
    AT(3, fake_backend_get_api_version),
    AT(4, fake_backend_get_build_id),
    AT(8, fake_backend_free),
    AT(10, fake_context_set_config),
    AT(11, fake_context_get_binary_size),
    AT(13, fake_context_create_from_binary),
    AT(14, fake_context_free),
    AT(17, fake_graph_set_config),
    AT(19, fake_graph_finalize),
    AT(20, fake_graph_retrieve),
    AT(21, fake_graph_execute),
    AT(25, fake_log_create),
    AT(26, fake_log_set_level),
    AT(27, fake_log_free),
    AT(35, fake_mem_register),
    AT(36, fake_mem_deregister),
    AT(37, fake_device_get_platform_info),
    AT(38, fake_device_free_platform_info),
    AT(39, fake_device_get_infrastructure),
    AT(40, fake_device_create),
    AT(42, fake_device_get_info),
    AT(43, fake_device_free),
    AT(48, fake_error_get_message),
    AT(68, fake_context_create_mapped),
};

static const fake_function system_functions[FAKE_SYSTEM_SLOTS] = {
    AT(0, fake_system_context_create),
    AT(1, fake_system_get_binary_info),
    AT(2, fake_system_get_metadata),
    AT(3, fake_system_context_free),
    AT(4, fake_system_tensor_bytes),
    AT(5, fake_log_create),
    AT(6, fake_log_set_level),
    AT(7, fake_log_free),
};

static void fill(fake_function *slots, const fake_function *functions, uint32_t count,
                 uint32_t left_out) {
    for (uint32_t i = 0; i < count; i++)
        slots[i] = i == left_out ? NULL : functions[i] ? functions[i] : (fake_function)not_here;
}

static struct fake_core_interface core;
static struct fake_system_interface system_interface;

static void prepare(void) {
    struct fake_switches switches = fake_switches_now();

    core.backend_id = FAKE_BACKEND_ID;
    core.provider = PROVIDER;
    fake_backend_get_api_version(&core.api);
    fill(core.slots, core_functions, FAKE_CORE_SLOTS, switches.null_slot);
    system_interface.provider = SYSTEM_PROVIDER;
    system_interface.api = (struct fake_version){1, 15, 0};
    fill(system_interface.slots, system_functions, FAKE_SYSTEM_SLOTS, FAKE_NONE);
}

static uint64_t give(const void *interface, const void **list, const void *const **out,
                     uint32_t *count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    if (out == NULL || count == NULL || fake_switches_bad())
        return FAKE_INVALID_ARGUMENT;
    pthread_once(&once, prepare);
    *list = interface;
    *out = list;
    *count = fake_switches_now().no_provider ? 0 : 1;
    return FAKE_OK;
}

FAKE_EXPORT uint64_t QnnInterface_getProviders(const void *const **out, uint32_t *count) {
    static const void *list;

    return give(&core, &list, out, count);
}

FAKE_EXPORT uint64_t QnnSystemInterface_getProviders(const void *const **out, uint32_t *count) {
    static const void *list;

    return give(&system_interface, &list, out, count);
}
